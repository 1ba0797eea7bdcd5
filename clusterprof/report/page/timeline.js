// The timeline by rank as it is pointed at and walked through; timeline_data.js has its data, and
// timeline_draw.js draws it.
(() => {
  const { element, onPrint, timeline } = clusterprof;
  const byId = (id) => document.getElementById(id);
  const canvas = byId("canvas");
  if (!timeline || !canvas) return;
  const {
    data, whole, first, of, begin, spanBegin, spanEnd, rowsOf,
    ms, stepName, wordOf, stepAt, firstSpan, timesOf, rowOf, facts, near, telling,
  } = timeline;
  const minimap = byId("minimap"), scroller = byId("lanes");
  const tip = byId("tip"), announcement = byId("announcement"), details = byId("details");
  const chooser = byId("step"), beside = byId("beside"), preset = byId("preset"), search = byId("search");
  const holder = byId("drawing");
  const LEAST = 20;
  // What is shown and how: read by those who draw it, written here.
  const scene = {
    panels: [],              // each the step that it shows: its zero, its length, and where it is drawn
    view: { lo: 0, hi: 1 },  // since each panel's zero
    shown: [],               // lanes, from top to bottom
    tops: [],
    kept: new Set(),         // lanes that stay on top
    pointed: null, pinned: null, selection: null,
    size: { width: 0, gutter: 0, height: 0, total: 0 },
  };
  const { TOP, ask, layout, draw, fit, span, x, time } = clusterprof.painter(timeline, scene);
  let touched = false;

  data.steps.forEach((step, index) => {
    const name = stepName(step) + wordOf(step) + (step.steady ? "" : " (not steady)");
    chooser.add(new Option(name, String(index)));
    beside.add(new Option(name, String(index)));
  });
  if (data.steps.length > 1) chooser.add(new Option("all steps", "all"));
  data.presets.forEach(({ name, lanes }, index) => preset.add(new Option(`${name} (${lanes.length})`, String(index))));
  const chosenOnes = new Option("selected ranks", "chosen", false, false);

  const listed = (rows) => element("dl", {}, ...rows.flatMap(([name, value]) =>
    [element("dt", { textContent: name }), element("dd", { textContent: value })]));
  const spoken = ([title, rows]) => `${title}: ${rows.map(([name, value]) => `${name} ${value}`).join(", ")}`;
  const same = (one, other) => one === other || (one && other && one.call === other.call && one.span === other.span);

  function show(it, px, py) {
    if (!same(it, scene.pointed)) { scene.pointed = it; ask(); }
    if (!it) { tip.style.visibility = "hidden"; return ""; }
    const [title, rows] = facts(it);
    tip.replaceChildren(element("b", { textContent: title }), listed(rows));
    const widest = holder.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(px + 16, widest))}px`;
    // Under a low drawing the tip hides no lane; in a tall one it stays near the pointer.
    const low = holder.offsetHeight < 420;
    tip.style.top = `${low ? holder.offsetHeight + 6 : Math.min(py + 18, holder.offsetHeight + 6)}px`;
    tip.style.visibility = "visible";
    return spoken([title, rows]);
  }

  // Pinned details stay below the drawing, to be read, copied and linked.
  function pin(it) {
    scene.pinned = it;
    details.hidden = !it;
    if (it) {
      const [title, rows] = facts(it);
      const copy = element("button", { type: "button", textContent: "copy" });
      copy.addEventListener("click", () => clusterprof.copy(copy, [title, ...rows.map((row) => row.join(": "))].join("\n"), details));
      const closer = element("button", { type: "button", textContent: "zoom to it" });
      closer.addEventListener("click", () => {
        const [from, to] = timesOf(it), panel = panelOf(from), about = Math.max(to - from, LEAST);
        look(from - panel.zero - about * .3, to - panel.zero + about * .3);
      });
      const close = element("button", { type: "button", textContent: "close" });
      close.addEventListener("click", () => { pin(null); canvas.focus(); });
      const link = element("a", { href: clusterprof.hash(state()), textContent: "link to this moment" });
      const named = data.findings.filter((each) => each.ranks.includes(data.lanes[it.lane].rank));
      const about = named.flatMap(({ anchor, code }, index) => [index ? ", " : "findings that name this rank: ",
        element("a", { href: `#${anchor}`, textContent: code })]);
      details.replaceChildren(element("b", { textContent: title }), listed(rows), ...(named.length ? [element("p", {}, ...about)] : []), element("p", {}, copy, " ", closer, " ", close, " ", link));
    }
    remember();
    ask();
  }

  // What is at a point of the canvas: a span or a call, or null.
  function under(px, py) {
    const panel = scene.panels.find((each) => px >= each.left && px <= each.right);
    const down = py + scroller.scrollTop;
    const index = scene.shown.findIndex((_, at) => down >= scene.tops[at] - 4 && down < scene.tops[at + 1] - 4);
    if (!panel || index < 0 || py < TOP - 6) return null;
    const lane = scene.shown[index], rows = rowsOf[lane];
    const row = rows.find((each) => down < scene.tops[index] + each.top + each.height + 1) || rows[rows.length - 1];
    return near(lane, row, time(panel, px), (4 / (panel.right - panel.left)) * span());
  }

  const panelOf = (moment) => scene.panels.find((each) => moment >= each.zero && moment <= each.zero + each.length) || scene.panels[0];
  const furthest = () => Math.max(...scene.panels.map((panel) => panel.length));

  function look(lo, hi) {
    const wide = Math.max(hi - lo, LEAST), all = furthest() * 1.02;
    if (wide >= all) scene.view = { lo: 0, hi: all };
    else {
      lo = Math.max(-wide * .02, Math.min(lo, furthest() - wide * .9));
      scene.view = { lo, hi: lo + wide };
    }
    show(null);
    remember();
    ask();
  }

  function zoom(factor, about = (scene.view.lo + scene.view.hi) / 2) {
    look(about - (about - scene.view.lo) * factor, about + (scene.view.hi - about) * factor);
  }
  const move = (part) => look(scene.view.lo + span() * part, scene.view.hi + span() * part);

  function choose() {
    const one = data.steps[Number(chooser.value)], other = beside.value === "" ? null : data.steps[Number(beside.value)];
    beside.disabled = !one;
    scene.panels = one ? [one, ...(other && other !== one ? [other] : [])].map((step) => ({ step, zero: step.begin, length: step.end - step.begin }))
      : [{ step: null, zero: whole.lo, length: whole.hi - whole.lo }];
    fit();
    look(0, Infinity);
  }

  // Lanes: a choice by name, ranks and hosts by the field, and those that are kept.
  function openLanes(lanes, label) {
    scene.shown = [...new Set([...scene.kept, ...lanes])].sort((one, other) => one - other);
    if (label === undefined) {
      if (!chosenOnes.parentElement) preset.add(chosenOnes);
      chosenOnes.textContent = `selected ranks (${scene.shown.length})`;
      preset.value = "chosen";
    }
    scroller.scrollTop = 0;
    remember();
    layout();
  }
  function openPreset(index) {
    preset.value = String(index);
    openLanes(data.presets[index].lanes, index);
  }
  function find(text) {
    const wanted = new Set();
    for (const word of text.trim().split(/[\s,]+/).filter(Boolean)) {
      const [, from, , to] = /^(\d+)([-–:](\d+))?$/.exec(word) || [];
      data.lanes.forEach((lane, index) => {
        if (from !== undefined ? lane.rank >= Number(from) && lane.rank <= Number(to ?? from) : lane.host.includes(word)) wanted.add(index);
      });
    }
    if (!text.trim()) openPreset(0);
    else openLanes([...wanted]);
    search.setAttribute("aria-invalid", String(Boolean(text.trim()) && !wanted.size));
  }
  function keep(lane) {
    if (!scene.kept.delete(lane)) scene.kept.add(lane);
    scene.shown.sort((one, other) => one - other);
    remember();
    layout();
  }

  // The state as the address has it: milliseconds since the step's begin, ranks as they are called.
  const inMs = (units) => +((units * data.unit_ns) / 1e6).toFixed(4);
  const toUnits = (text) => (Number(text) * 1e6) / data.unit_ns;
  function state() {
    const all = scene.panels[0].step === null, whole_ = scene.view.lo <= 0 && scene.view.hi >= furthest();
    const it = scene.pinned && timesOf(scene.pinned), step = it && stepAt((it[0] + it[1]) / 2);
    return {
      anchor: "timeline",
      step: all ? "all" : scene.pinned && !all && scene.panels.length > 1 ? scene.panels[0].step.step : scene.panels[0].step.step ?? undefined,
      with: scene.panels.length > 1 ? scene.panels[1].step.step : undefined,
      ranks: preset.value === "chosen" ? spelt(scene.shown.map((lane) => data.lanes[lane].rank)) : preset.value === "0" ? undefined : `preset${preset.value}`,
      keep: scene.kept.size ? spelt([...scene.kept].map((lane) => data.lanes[lane].rank)) : undefined,
      from: whole_ ? undefined : inMs(scene.view.lo),
      to: whole_ ? undefined : inMs(scene.view.hi),
      rank: it ? data.lanes[scene.pinned.lane].rank : undefined,
      row: it ? rowsOf[scene.pinned.lane].indexOf(rowOf(scene.pinned)) : undefined,
      of: it && step.step !== null ? step.step : undefined,
      at: it ? inMs((it[0] + it[1]) / 2 - step.begin) : undefined,
    };
  }
  // 0–3,8 for 0, 1, 2, 3, 8
  function spelt(ranks) {
    const out = [];
    for (const rank of [...ranks].sort((one, other) => one - other)) {
      if (out.length && out[out.length - 1][1] === rank - 1) out[out.length - 1][1] = rank;
      else out.push([rank, rank]);
    }
    return out.map(([from, to]) => (from === to ? `${from}` : `${from}-${to}`)).join(",");
  }
  const lanesOf = (text) => data.lanes.flatMap((lane, index) =>
    text.split(",").some((part) => { const [from, to = from] = part.split("-").map(Number); return lane.rank >= from && lane.rank <= to; }) ? [index] : []);
  let later = 0;
  function remember() {
    if (!touched) return;
    clearTimeout(later);
    later = setTimeout(() => clusterprof.remember(state()), 200);
  }

  // Shows what an address asks for; what it leaves out stays as it is.
  function restore(asked) {
    const { step, rank } = asked;
    if (asked.anchor !== "timeline") return;
    const index = data.steps.findIndex((each) => String(each.step) === (asked.of ?? step));
    if (step === "all" && data.steps.length > 1) { chooser.value = "all"; choose(); }
    else if (step !== undefined || asked.of !== undefined) {
      const main = data.steps.findIndex((each) => String(each.step) === step), other = data.steps.findIndex((each) => String(each.step) === asked.with);
      const first_ = main >= 0 ? main : index;
      if (first_ >= 0) {
        chooser.value = String(first_);
        beside.value = other >= 0 ? String(other) : "";
        choose();
      } else announce(`step ${step} is not in this page: it carries ${data.steps.length} of them`);
    }
    if (asked.keep) { scene.kept.clear(); for (const lane of lanesOf(asked.keep)) scene.kept.add(lane); }
    if (/^preset\d+$/.test(asked.ranks || "") && data.presets[Number(asked.ranks.slice(6))]) openPreset(Number(asked.ranks.slice(6)));
    else if (asked.ranks) openLanes(lanesOf(asked.ranks));
    const [from, to] = [toUnits(asked.from), toUnits(asked.to)];
    if (to > from) look(from, to);
    if (rank === undefined) return;
    const lane = data.lanes.findIndex((each) => String(each.rank) === rank);
    if (lane < 0) { announce(`rank ${rank} has no report: it is not in the timeline`); return; }
    if (!scene.shown.includes(lane)) openLanes([...scene.shown, lane]);
    draw();
    scroller.scrollTop = Math.max(0, scene.tops[scene.shown.indexOf(lane)] - TOP - 20);
    const zero = index >= 0 ? data.steps[index].begin : scene.panels[0].zero;
    if (Number.isNaN(toUnits(asked.at))) {
      const it = telling(lane, zero, zero + scene.panels[0].length);
      if (it) pin(it);
      return;
    }
    const moment = zero + toUnits(asked.at), panel = panelOf(moment), rows = rowsOf[lane];
    const wanted = rows[Number(asked.row)];
    const tried = wanted ? [wanted] : [...rows.filter((row) => row.calls), ...rows.filter((row) => !row.calls).reverse()];
    const slack = span() / 400;
    for (const row of tried) {
      const it = near(lane, row, moment, slack);
      if (it) { pin(it); return; }
    }
  }

  const announce = (text) => { announcement.textContent = text; byId("said").textContent = text; };

  chooser.addEventListener("change", () => { touched = true; choose(); });
  beside.addEventListener("change", () => { touched = true; choose(); });
  preset.addEventListener("change", () => { touched = true; if (preset.value !== "chosen") openPreset(Number(preset.value)); });
  search.addEventListener("change", () => { touched = true; find(search.value); });
  const onClick = (id, act) => byId(id).addEventListener("click", () => { touched = true; act(); });
  onClick("earlier", () => move(-.5));
  onClick("later", () => move(.5));
  onClick("closer", () => zoom(.5));
  onClick("farther", () => zoom(2));
  onClick("reset", () => { scene.selection = null; pin(null); choose(); });
  const measure = byId("measure");
  onClick("measure", () => measure.setAttribute("aria-pressed", String(measure.getAttribute("aria-pressed") !== "true")));
  const help = byId("help");
  onClick("helps", () => help.showModal());

  function measured() {
    const said = byId("said");
    if (!scene.selection) { said.textContent = ""; return; }
    const [from, to] = [Math.min(scene.selection.from, scene.selection.to), Math.max(scene.selection.from, scene.selection.to)];
    const button = element("button", { type: "button", textContent: "zoom to it" });
    button.addEventListener("click", zoomToSelection);
    said.replaceChildren(`measured ${ms(to - from)}, from ${ms(from)} to ${ms(to)} `, button);
  }
  function zoomToSelection() {
    if (!scene.selection) return;
    const { from, to } = scene.selection;
    scene.selection = null;
    measured();
    look(Math.min(from, to), Math.max(from, to));
  }

  const offset = (event) => {
    const box = canvas.getBoundingClientRect(), around = holder.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top, event.clientX - around.left, event.clientY - around.top];
  };
  let drag = null, pinch = null;
  const fingers = new Map();    // pointers that are down, and where
  // Two fingers keep the moments below them.
  const apart = () => {
    const [one, other] = [...fingers.values()].sort((a, b) => a - b).map((px) => (px - pinch.left) / pinch.wide);
    return [one, Math.max(other, one + 20 / pinch.wide)];
  };
  function startPinch() {
    const panel = scene.panels.find((each) => Math.min(...fingers.values()) <= each.right) || scene.panels[0];
    drag = null;
    show(null);
    pinch = { left: panel.left, wide: panel.right - panel.left };
    pinch.moments = apart().map((at) => scene.view.lo + at * span());
  }
  function movePinch() {
    const [one, other] = apart(), [from, to] = pinch.moments, wide = (to - from) / (other - one);
    touched = true;
    look(from - one * wide, from - one * wide + wide);
  }
  canvas.addEventListener("pointerdown", (event) => {
    const [px] = offset(event);
    fingers.set(event.pointerId, px);
    if (fingers.size === 2) startPinch();
    if (fingers.size > 1) return;
    const panel = scene.panels.find((each) => px >= each.left && px <= each.right) || scene.panels[0];
    const select = event.shiftKey || measure.getAttribute("aria-pressed") === "true";
    drag = { at: event.clientX, panel, select: select && px >= scene.size.gutter, moved: false, ...scene.view };
    try { canvas.setPointerCapture(event.pointerId); } catch { /* a pointer that is gone by now */ }
  });
  canvas.addEventListener("pointermove", (event) => {
    const [px, py, tx, ty] = offset(event);
    if (fingers.has(event.pointerId)) fingers.set(event.pointerId, px);
    if (pinch) { if (fingers.size === 2) movePinch(); return; }
    if (drag && (drag.moved || Math.abs(event.clientX - drag.at) > 3)) {
      touched = drag.moved = true;
      if (drag.select) {
        const from = drag.panel, moment = (clientX) => time(from, clientX - canvas.getBoundingClientRect().left) - from.zero;
        scene.selection = { from: moment(drag.at), to: moment(event.clientX) };
        measured();
        ask();
        return;
      }
      canvas.classList.add("dragging");
      const by = ((drag.at - event.clientX) / (drag.panel.right - drag.panel.left)) * (drag.hi - drag.lo);
      look(drag.lo + by, drag.hi + by);
      return;
    }
    canvas.style.cursor = px < scene.size.gutter ? "pointer" : "";
    show(under(px, py), tx, ty);
  });
  const release = (event) => {
    fingers.delete(event.pointerId);
    if (!fingers.size) pinch = null;
    drag = null;
    canvas.classList.remove("dragging");
  };
  canvas.addEventListener("pointerup", (event) => {
    const clicked = drag && !drag.moved;
    release(event);
    if (!clicked) return;
    touched = true;
    const [px, py] = offset(event), down = py + scroller.scrollTop;
    const index = scene.shown.findIndex((_, at) => down >= scene.tops[at] - 4 && down < scene.tops[at + 1] - 4);
    if (px < scene.size.gutter) { if (index >= 0 && py >= TOP - 6) keep(scene.shown[index]); return; }
    pin(under(px, py));
    if (event.pointerType === "touch") show(null);
  });
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => show(null));
  canvas.addEventListener("dblclick", (event) => {
    const [px] = offset(event), panel = scene.panels.find((each) => px >= each.left && px <= each.right);
    touched = true;
    if (panel) zoom(.4, time(panel, px) - panel.zero);
  });
  canvas.addEventListener("wheel", (event) => {
    // A plain wheel scrolls the page; zooming takes a modifier or a pinch.
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const [px] = offset(event), panel = scene.panels.find((each) => px >= each.left && px <= each.right) || scene.panels[0];
    touched = true;
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * .004))), time(panel, px) - panel.zero);
  }, { passive: false });
  scroller.addEventListener("scroll", () => { show(null); ask(); });

  const onMinimap = (event) => {
    if (!event.buttons) return;
    const box = minimap.getBoundingClientRect();
    const about = ((event.clientX - box.left - scene.size.gutter) / (scene.size.width - scene.size.gutter - 8)) * scene.panels[0].length;
    touched = true;
    look(about - span() / 2, about + span() / 2);
  };
  minimap.addEventListener("pointerdown", onMinimap);
  minimap.addEventListener("pointermove", onMinimap);

  let cursor = null;
  const acts = {
    "+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), w: () => zoom(.7), s: () => zoom(1 / .7),
    a: () => move(-.2), d: () => move(.2), 0: () => choose(), "/": () => search.focus(),
    m: () => measure.click(), Enter: () => (scene.selection ? zoomToSelection() : pin(scene.pointed || cursor)),
    p: () => { const it = scene.pinned || scene.pointed; if (it) keep(it.lane); },
    Escape: () => { cursor = null; scene.selection = null; measured(); show(null); pin(null); },
  };
  canvas.addEventListener("keydown", (event) => {
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (acts[key]) { touched = true; acts[key](); }
    else if (key.startsWith("Arrow")) { cursor = step(key); speak(); }
    else return;
    event.preventDefault();
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "?" || event.target.closest?.("input, select, textarea, dialog")) return;
    event.preventDefault();
    help.showModal();
  });

  // Left and right walk along a row; up and down through one collective's ranks, or along the rows.
  function step(key) {
    cursor = cursor || (scene.pinned && { ...scene.pinned });
    if (!cursor) {
      const call = begin.findIndex((at, index) => at >= scene.panels[0].zero + scene.view.lo && scene.shown.includes(data.lane[index]));
      if (call >= 0) return { lane: data.lane[call], call, span: -1 };
      const row = scene.shown.length ? rowsOf[scene.shown[0]][0] : null;
      return row && row.range ? { lane: scene.shown[0], call: -1, span: firstSpan(row.range, scene.panels[0].zero + scene.view.lo) } : null;
    }
    const by = key === "ArrowRight" || key === "ArrowDown" ? 1 : -1, row = rowOf(cursor);
    if (key === "ArrowUp" || key === "ArrowDown") {
      if (cursor.call >= 0) {
        const members = [];
        for (let call = first[of[cursor.call]]; call < first[of[cursor.call] + 1]; call++) members.push(call);
        members.sort((one, other) => data.lane[one] - data.lane[other]);
        const next = members[Math.max(0, Math.min(members.length - 1, members.indexOf(cursor.call) + by))];
        return { lane: data.lane[next], call: next, span: -1 };
      }
      const rows = scene.shown.flatMap((lane) => rowsOf[lane].map((each) => [lane, each]));
      const at = rows.findIndex(([lane, each]) => lane === cursor.lane && each === row), [from, to] = timesOf(cursor);
      for (let next = at + by; rows[next]; next += by) {
        const it = near(rows[next][0], rows[next][1], (from + to) / 2, span() / 20);
        if (it) return it;
      }
      return cursor;
    }
    if (cursor.call >= 0) {
      const next = row.calls[row.calls.indexOf(cursor.call) + by];
      return next === undefined ? cursor : { ...cursor, call: next };
    }
    // of spans those that can be seen
    const least = span() / 500;
    for (let next = cursor.span + by; next >= row.range[0] && next < row.range[1]; next += by) {
      if (spanEnd[next] - spanBegin[next] >= least) return { ...cursor, span: next };
    }
    return cursor;
  }

  function speak() {
    if (!cursor) return;
    const [from, to] = timesOf(cursor), wide = span();
    let panel = scene.panels.find((each) => to >= each.zero + scene.view.lo && from <= each.zero + scene.view.hi);
    if (!panel) {
      panel = panelOf(from);
      look(from - panel.zero - wide / 2, from - panel.zero + wide / 2);
    }
    const index = scene.shown.indexOf(cursor.lane);
    if (index < 0) { openLanes([...scene.shown, cursor.lane]); }
    const top = scene.tops[scene.shown.indexOf(cursor.lane)];
    if (top - scroller.scrollTop < TOP || top - scroller.scrollTop > scene.size.height - 60) scroller.scrollTop = top - TOP - 20;
    const box = canvas.getBoundingClientRect(), around = holder.getBoundingClientRect();
    const down = top - scroller.scrollTop + rowOf(cursor).top + box.top - around.top;
    announcement.textContent = show(cursor, Math.max(x(panel, from), scene.size.gutter), down);
  }

  new ResizeObserver(layout).observe(holder);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ask);
  onPrint(() => { layout(); draw(); });
  chooser.value = String(data.typical);
  // Two steps side by side need the width of two.
  beside.value = data.worst >= 0 && holder.clientWidth >= 800 ? String(data.worst) : "";
  preset.value = "0";
  scene.shown = [...data.presets[0].lanes];
  choose();
  layout();
  draw();
  clusterprof.onState(restore);
  document.documentElement.dataset.timeline = "drawn";
})();
