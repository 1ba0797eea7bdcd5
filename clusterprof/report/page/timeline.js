// The timeline by rank as it is drawn, pointed at and walked through (timeline_data.js has its data).
(() => {
  const { css, element, density, onPaper, onPrint, timeline } = clusterprof;
  const byId = (id) => document.getElementById(id);
  const canvas = byId("canvas");
  if (!timeline || !canvas) return;
  const {
    data, whole, last, first, of, begin, end, S, spanBegin, spanEnd, KINDS, kindOf, IDLE, WHAT, rowsOf,
    ms, stepName, stepAt, laneName, firstSpan, timesOf, rowOf, facts, near, telling,
  } = timeline;
  const context = canvas.getContext("2d");
  const minimap = byId("minimap"), scroller = byId("lanes"), filler = byId("filler");
  const tip = byId("tip"), announcement = byId("announcement"), details = byId("details");
  const chooser = byId("step"), beside = byId("beside"), preset = byId("preset"), search = byId("search");
  const holder = byId("drawing");
  const TOP = 40, GAP = 12, LEAST = 20, PAGE = 1500;
  let panels = [];              // each the step that it shows: its zero, its length, and where it is drawn
  let view = { lo: 0, hi: 1 };  // since each panel's zero
  let shown = [];               // lanes, from top to bottom
  let tops = [];
  const kept = new Set();       // lanes that stay on top
  let pointed = null, pinned = null, selection = null, touched = false;
  let size = { width: 0, gutter: 0, height: 0, total: 0 };
  let waiting = false, tones = null;

  const wordOf = (step) => {
    if (data.worst < 0) return "";
    if (step === data.steps[data.worst]) return step.steady ? ", longest steady" : ", longest";
    return step === data.steps[data.typical] ? ", typical" : "";
  };
  data.steps.forEach((step, index) => {
    const name = stepName(step) + wordOf(step) + (step.steady ? "" : " (not steady)");
    chooser.add(new Option(name, String(index)));
    beside.add(new Option(name, String(index)));
  });
  if (data.steps.length > 1) chooser.add(new Option("all steps", "all"));
  data.presets.forEach(({ name, lanes }, index) => preset.add(new Option(`${name} (${lanes.length})`, String(index))));
  const chosenOnes = new Option("selected ranks", "chosen", false, false);

  const span = () => view.hi - view.lo;
  const x = (panel, time) => panel.left + ((time - panel.zero - view.lo) / span()) * (panel.right - panel.left);
  const time = (panel, px) => panel.zero + view.lo + ((px - panel.left) / (panel.right - panel.left)) * span();

  function ask() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  }

  function layout() {
    const rest = shown.filter((lane) => !kept.has(lane));
    shown = [...shown.filter((lane) => kept.has(lane)), ...rest];
    tops = [TOP];
    for (const lane of shown) tops.push(tops[tops.length - 1] + rowsOf[lane].height + GAP);
    size.total = tops[tops.length - 1];
    size.height = Math.min(size.total, onPaper() ? PAGE : Math.max(260, Math.round(innerHeight * .76)));
    canvas.style.height = `${size.height}px`;
    scroller.style.maxHeight = `${size.height}px`;
    filler.style.height = `${size.total - size.height}px`;
    ask();
  }

  // Where the panels stand.
  function fit() {
    size.width = holder.clientWidth;
    size.gutter = size.width < 560 ? 106 : 128;
    const each = (size.width - size.gutter - 8 - 14 * (panels.length - 1)) / panels.length;
    panels.forEach((panel, index) => {
      panel.left = size.gutter + index * (each + 14);
      panel.right = panel.left + each;
    });
  }

  function draw() {
    const names = ["ink", "soft", "line", "track", "card", "late", "idle", "compute", "wait", "transfer", "copy",
      "range", "cuda", "cuda_wait", "blocked", "thread_wait", "python", "op", "page"];
    tones = Object.fromEntries(names.map((name) => [name, css(`--${name === "copy" ? "copies" : name}`)]));
    const ratio = density();
    fit();
    if (size.width <= size.gutter) return;  // hidden
    canvas.width = Math.round(size.width * ratio);
    canvas.height = Math.round(size.height * ratio);
    const scrolled = scroller.scrollTop;
    const inView = shown.map((lane, index) => [lane, tops[index] - scrolled])
      .filter(([lane, top]) => top + rowsOf[lane].height >= TOP && top <= size.height);
    drawStill(inView, ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.textBaseline = "middle";
    for (const panel of panels) {
      inside(panel, TOP - 6, () => {
        for (const [lane, top] of inView) for (const row of rowsOf[lane]) if (row.calls) drawCalls(panel, lane, row, top + row.top);
      });
      inside(panel, TOP, () => overlays(panel, scrolled));
    }
    context.fillStyle = tones.card;
    context.fillRect(0, 0, size.width, TOP - 6);
    for (const panel of panels) scale(panel);
    drawMinimap();
  }

  // All but the calls changes with the view only: it is kept as a picture, since pointing at things
  // draws some sixty times a second.
  const still = { of: "", picture: element("canvas") };
  function drawStill(inView, ratio) {
    const now = JSON.stringify([view, panels, inView, [...kept], size, ratio, tones]);
    if (now === still.of) { context.drawImage(still.picture, 0, 0); return; }
    tones.hatch = hatched(tones);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.textBaseline = "middle";
    for (const panel of panels) inside(panel, TOP - 6, () => grid(panel));
    for (const [lane, top] of inView) drawLane(lane, top);
    still.of = now;
    [still.picture.width, still.picture.height] = [canvas.width, canvas.height];
    still.picture.getContext("2d").drawImage(canvas, 0, 0);
  }

  // Thin diagonal lines, so that idle is no tone among the others, on screen and in print.
  function hatched() {
    const tile = element("canvas", { width: 6, height: 6 }), ink = tile.getContext("2d");
    ink.strokeStyle = tones.idle;
    ink.lineWidth = 1.1;
    ink.beginPath();
    for (const off of [-6, 0, 6]) { ink.moveTo(off, 6); ink.lineTo(off + 6, 0); }
    ink.stroke();
    return context.createPattern(tile, "repeat");
  }

  function inside(panel, top, paint) {
    context.save();
    context.beginPath();
    context.rect(panel.left, top, panel.right - panel.left, size.height - top);
    context.clip();
    paint();
    context.restore();
  }

  const font = (px, weight = 400) => { context.font = `${weight} ${px}px ${getComputedStyle(document.body).fontFamily}`; };

  function drawLane(lane, top) {
    const { rank, host, named } = data.lanes[lane], rows = rowsOf[lane];
    font(12, 600);
    context.textAlign = "left";
    context.fillStyle = named ? tones.late : tones.ink;
    context.fillText((kept.has(lane) ? "▪ " : "") + `rank ${rank}`, 8, top + 8);
    font(10);
    context.fillStyle = tones.soft;
    const narrow = size.width < 560;
    if (host && rows.length > 1) context.fillText(host.slice(0, narrow ? 7 : 12), 8, top + 23);
    context.textAlign = "right";
    for (const row of rows) {
      context.fillStyle = tones.soft;
      // beside a long name there is no space for its first row's
      if (narrow && (rows.length === 1 || (row === rows[0] && rank > 99))) continue;
      context.fillText(row.label.slice(0, narrow ? 8 : 10), size.gutter - 6, top + row.top + row.height / 2);
    }
    for (const panel of panels) {
      inside(panel, TOP - 6, () => {
        context.globalAlpha = .55;
        context.fillStyle = tones.track;
        for (const row of rows) context.fillRect(panel.left, top + row.top, panel.right - panel.left, row.height);
        context.globalAlpha = 1;
        for (const row of rows) if (!row.calls) drawSpans(panel, row, top + row.top);
      });
    }
  }

  // What is narrower than a pixel is not drawn by itself: each column of pixels shows in which parts
  // its kinds take it.
  function drawSpans(panel, row, top) {
    const from = panel.zero + view.lo, to = panel.zero + view.hi, scale = (panel.right - panel.left) / span();
    const height = row.height, taken = new Float64Array(KINDS.length), ink = KINDS.map((kind) => tones[kind]);
    let column = -1, any = false;
    const flush = () => {
      let up = top + height;
      for (let kind = 0; kind < taken.length; kind++) {
        if (!taken[kind]) continue;
        const tall = Math.min(taken[kind], 1) * height;
        if (kind === IDLE) context.globalAlpha = .45;
        context.fillStyle = ink[kind];
        context.fillRect(column, up - tall, 1, tall);
        context.globalAlpha = 1;
        up -= tall;
      }
      taken.fill(0);
      any = false;
    };
    const texts = [];
    for (let k = firstSpan(row.range, from); k < row.range[1] && spanBegin[k] < to; k++) {
      const left = panel.left + (spanBegin[k] - from) * scale, right = panel.left + (spanEnd[k] - from) * scale;
      const wide = right - left;
      if (wide < 1.5) {
        const at = Math.floor(left);
        if (at !== column) { if (any) flush(); column = at; }
        taken[kindOf[k]] += Math.max(wide, row.name === "device" ? 0 : .15);
        any = true;
        continue;
      }
      if (any) flush();
      const kind = KINDS[kindOf[k]];
      const seen = Math.max(left, panel.left), until = Math.min(right, panel.right);
      context.fillStyle = kind === "idle" ? tones.hatch : tones[kind];
      context.fillRect(seen, top, until - seen, height);
      if (kind === "range") {
        context.strokeStyle = tones.soft;
        context.lineWidth = .7;
        context.strokeRect(left + .5, top + .5, wide - 1, height - 1);
        context.lineWidth = 1;
      }
      if (until - seen > 34) texts.push([k, kind, seen, until]);
    }
    if (any) flush();
    if (!texts.length) return;
    font(10.5);
    context.textAlign = "left";
    for (const [k, kind, left, right] of texts) {
      const text = kind === "idle" ? `idle ${ms(spanEnd[k] - spanBegin[k], 1)}` : S.names[S.name[k]] || WHAT[kind];
      const most = Math.floor((right - left - 6) / 5.9);
      if (kind === "idle" && text.length > most) continue;
      if (kind === "idle") {
        context.fillStyle = tones.card;
        context.fillRect(left + 2, top + 1, text.length * 5.9 + 4, height - 2);
      }
      context.fillStyle = kind === "idle" || kind === "range" || kind === "thread_wait" ? tones.ink : css(`--on-${kind}`) || tones.card;
      context.fillText(text.length > most ? `${text.slice(0, Math.max(most - 1, 1))}…` : text, left + 4, top + height / 2 + .5);
    }
  }

  const chosen = () => { const it = pointed || pinned; return it && it.call >= 0 ? of[it.call] : -1; };

  function drawCalls(panel, lane, row, top) {
    const from = panel.zero + view.lo, to = panel.zero + view.hi, lit = chosen();
    const marks = [];
    let drawn = -1;
    for (const call of row.calls) {
      if (begin[call] > to) break;
      if (end[call] < from) continue;
      const group = of[call];
      const left = x(panel, begin[call]), right = x(panel, end[call]);
      const late = data.late[group] === lane;
      // What is narrower than a pixel and falls on one already drawn would not be seen.
      if (right - left < 1 && !late && lit !== group && drawn >= right) continue;
      drawn = Math.max(drawn, left + 1);
      context.globalAlpha = lit < 0 || lit === group ? 1 : .4;
      if (data.alone[group]) {
        context.strokeStyle = tones.soft;
        context.strokeRect(left + .5, top + .5, Math.max(right - left - 1, .5), row.height - 3);
      } else {
        const turn = Math.min(Math.max(x(panel, last[group]), left), right);
        context.fillStyle = tones.wait;
        if (turn - left > .05) context.fillRect(left, top, Math.max(turn - left, .5), row.height - 1);
        context.fillStyle = tones.transfer;
        context.fillRect(turn, top, Math.max(right - turn, .75), row.height - 1);
      }
      // Zooming in shows the marks of smaller delays; at a distance they would hide the large.
      if (late && x(panel, last[group]) - x(panel, last[group] - data.margin[group]) >= 3) marks.push([x(panel, last[group]), group]);
    }
    context.fillStyle = tones.late;
    for (const [at, group] of marks) {
      context.globalAlpha = lit < 0 || lit === group ? 1 : .4;
      context.fillRect(at - 1, top - 2, 2, row.height + 1);
      context.beginPath();
      context.moveTo(at, top + 3);
      context.lineTo(at - 4.5, top - 5);
      context.lineTo(at + 4.5, top - 5);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  // The moment that a whole collective waited for, across all lanes; what is pinned; what is measured.
  function overlays(panel, scrolled) {
    const group = chosen();
    if (group >= 0) {
      context.strokeStyle = data.late[group] >= 0 ? tones.late : tones.ink;
      line(x(panel, last[group]));
      context.strokeStyle = tones.ink;
      for (let call = first[group]; call < first[group + 1]; call++) outline(panel, { lane: data.lane[call], call, span: -1 }, scrolled);
    }
    context.strokeStyle = tones.ink;
    context.lineWidth = 2;
    for (const it of [pinned, pointed]) if (it) outline(panel, it, scrolled);
    context.lineWidth = 1;
    if (selection) {
      const left = x(panel, panel.zero + Math.min(selection.from, selection.to)), right = x(panel, panel.zero + Math.max(selection.from, selection.to));
      context.globalAlpha = .18;
      context.fillStyle = tones.ink;
      context.fillRect(left, TOP - 6, right - left, size.height);
      context.globalAlpha = 1;
      context.strokeStyle = tones.ink;
      line(left);
      line(right);
    }
  }

  function line(at) {
    context.beginPath();
    context.moveTo(at, TOP - 6);
    context.lineTo(at, size.height);
    context.stroke();
  }

  function outline(panel, it, scrolled) {
    const index = shown.indexOf(it.lane);
    if (index < 0) return;
    const row = rowOf(it), [from, to] = timesOf(it), left = x(panel, from), right = x(panel, to);
    if (right < panel.left || left > panel.right) return;
    context.strokeRect(left - .5, tops[index] - scrolled + row.top - .5, Math.max(right - left, 1) + 1, row.height);
  }

  const tick = (panel) => {
    const rough = span() / Math.max(2, Math.floor((panel.right - panel.left) / 78));
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  };

  // The lines of the ticks stand behind the lanes.
  function grid(panel) {
    const every = tick(panel);
    context.strokeStyle = tones.line;
    for (let k = Math.ceil(view.lo / every); k * every <= view.hi; k++) line(Math.round(x(panel, panel.zero + k * every)) + .5);
  }

  // Ticks count from the begin of the step in view, so that steps can be compared.
  function scale(panel) {
    const all = panel.step === null;
    const zero = panel.zero, every = tick(panel);
    const decimals = Math.max(0, Math.min(4, -Math.floor(Math.log10((every * data.unit_ns) / 1e6) + 1e-9)));
    font(11, 600);
    context.fillStyle = tones.ink;
    context.textAlign = "left";
    const title = all ? "all steps" : stepName(panel.step) + (panels.length > 1 ? wordOf(panel.step) : "");
    context.fillText(title, panel.left, 10);
    const until = panel.left + context.measureText(title).width;
    font(11);
    context.fillStyle = tones.soft;
    // a step's length is the median over ranks; what is drawn is from the first begin to the last end
    const took = all || panel.step.step === null ? "" : `: ${ms(panel.step.median, 2)}${data.lanes.length > 1 ? " in the median of ranks" : ""}`, unit = "ms since the first rank's start";
    context.fillText(took, until, 10);
    context.textAlign = "right";
    if (until + context.measureText(took + unit).width + 12 < panel.right) context.fillText(unit, panel.right, 10);
    context.textAlign = "center";
    const stop = all ? whole.hi - zero : panel.step.end - zero;
    const endAt = x(panel, zero + stop);
    for (let k = Math.ceil(view.lo / every); k * every <= view.hi; k++) {
      const at = Math.round(x(panel, zero + k * every)) + .5;
      if (at > panel.left + 4 && at < panel.right - 14 && !(at > endAt - 98 && at < endAt + 12)) context.fillText(clusterprof.ms(k * every * data.unit_ns, decimals).replace(" ms", ""), at, 25);
    }
    context.strokeStyle = tones.soft;
    const edges = all ? data.steps.map((step) => step.begin - zero) : [0, stop];
    context.setLineDash([3, 3]);
    for (const edge of edges) {
      const at = x(panel, zero + edge);
      if (at < panel.left - 1 || at > panel.right + 1) continue;
      context.beginPath();
      context.moveTo(Math.round(at) + .5, TOP - 9);
      context.lineTo(Math.round(at) + .5, size.height);
      context.stroke();
    }
    context.setLineDash([]);
    context.fillStyle = tones.ink;
    if (endAt > panel.left + 30 && endAt <= panel.right + 1) {
      context.textAlign = "right";
      context.fillText(`last end ${clusterprof.ms(stop * data.unit_ns, 2).replace(" ms", "")}`, Math.min(endAt, panel.right) - 3, 25);
    }
    if (view.lo <= 0 && view.hi > 0) {
      context.textAlign = "left";
      context.fillText("0", Math.max(x(panel, zero), panel.left) + 2, 25);
    }
  }

  // The whole step of the first lane in view, with the window on it.
  const overview = { of: "", picture: null };
  function drawMinimap() {
    const ratio = density(), ink = minimap.getContext("2d"), panel = panels[0];
    const tall = 22, wide = size.width - size.gutter - 8, until = panel.length;
    minimap.width = Math.round(size.width * ratio);
    minimap.height = Math.round(tall * ratio);
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    const lane = shown.find((each) => data.lanes[each].named) ?? shown[0];
    const row = lane === undefined ? null : rowsOf[lane].find((each) => each.name === "device");
    const at = (moment) => size.gutter + Math.max(0, Math.min(1, moment / until)) * wide;
    // Its bars change with the step, the lane and the width only.
    const now = [lane, panel.zero, until, size.width, ratio, tones.compute].join();
    if (now !== overview.of) {
      Object.assign(overview, { of: now, picture: element("canvas", { width: minimap.width, height: minimap.height }) });
      const bars = overview.picture.getContext("2d");
      bars.setTransform(ratio, 0, 0, ratio, 0, 0);
      bars.fillStyle = tones.track;
      bars.fillRect(size.gutter, 4, wide, tall - 8);
      for (let k = row ? firstSpan(row.range, panel.zero) : 0; row && k < row.range[1] && spanBegin[k] < panel.zero + until; k++) {
        if (kindOf[k] === IDLE) continue;
        const left = at(spanBegin[k] - panel.zero);
        bars.fillStyle = tones[KINDS[kindOf[k]]];
        bars.fillRect(left, 4, Math.max(at(spanEnd[k] - panel.zero) - left, .25), tall - 8);
      }
    }
    ink.drawImage(overview.picture, 0, 0, size.width, tall);
    ink.fillStyle = tones.soft;
    ink.font = `10px ${getComputedStyle(document.body).fontFamily}`;
    ink.textBaseline = "middle";
    ink.textAlign = "right";
    if (lane !== undefined) ink.fillText(size.width < 560 ? laneName(lane) : `device of ${laneName(lane)}`, size.gutter - 6, tall / 2);
    ink.strokeStyle = tones.ink;
    ink.lineWidth = 1.5;
    const left = at(view.lo);
    ink.strokeRect(left + .75, 1.5, Math.max(at(view.hi) - left - 1.5, 3), tall - 3);
  }

  const listed = (rows) => element("dl", {}, ...rows.flatMap(([name, value]) =>
    [element("dt", { textContent: name }), element("dd", { textContent: value })]));
  const spoken = ([title, rows]) => `${title}: ${rows.map(([name, value]) => `${name} ${value}`).join(", ")}`;
  const same = (one, other) => one === other || (one && other && one.call === other.call && one.span === other.span);

  function show(it, px, py) {
    if (!same(it, pointed)) { pointed = it; ask(); }
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
    pinned = it;
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
    const panel = panels.find((each) => px >= each.left && px <= each.right);
    const down = py + scroller.scrollTop;
    const index = shown.findIndex((_, at) => down >= tops[at] - 4 && down < tops[at + 1] - 4);
    if (!panel || index < 0 || py < TOP - 6) return null;
    const lane = shown[index], rows = rowsOf[lane];
    const row = rows.find((each) => down < tops[index] + each.top + each.height + 1) || rows[rows.length - 1];
    return near(lane, row, time(panel, px), (4 / (panel.right - panel.left)) * span());
  }

  const panelOf = (moment) => panels.find((each) => moment >= each.zero && moment <= each.zero + each.length) || panels[0];
  const furthest = () => Math.max(...panels.map((panel) => panel.length));

  function look(lo, hi) {
    const wide = Math.max(hi - lo, LEAST), all = furthest() * 1.02;
    if (wide >= all) view = { lo: 0, hi: all };
    else {
      lo = Math.max(-wide * .02, Math.min(lo, furthest() - wide * .9));
      view = { lo, hi: lo + wide };
    }
    show(null);
    remember();
    ask();
  }

  function zoom(factor, about = (view.lo + view.hi) / 2) {
    look(about - (about - view.lo) * factor, about + (view.hi - about) * factor);
  }
  const move = (part) => look(view.lo + span() * part, view.hi + span() * part);

  function choose() {
    const one = data.steps[Number(chooser.value)], other = beside.value === "" ? null : data.steps[Number(beside.value)];
    beside.disabled = !one;
    panels = one ? [one, ...(other && other !== one ? [other] : [])].map((step) => ({ step, zero: step.begin, length: step.end - step.begin }))
      : [{ step: null, zero: whole.lo, length: whole.hi - whole.lo }];
    fit();
    look(0, Infinity);
  }

  // Lanes: a choice by name, ranks and hosts by the field, and those that are kept.
  function openLanes(lanes, label) {
    shown = [...new Set([...kept, ...lanes])].sort((one, other) => one - other);
    if (label === undefined) {
      if (!chosenOnes.parentElement) preset.add(chosenOnes);
      chosenOnes.textContent = `selected ranks (${shown.length})`;
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
    if (!kept.delete(lane)) kept.add(lane);
    shown.sort((one, other) => one - other);
    remember();
    layout();
  }

  // The state as the address has it: milliseconds since the step's begin, ranks as they are called.
  const inMs = (units) => +((units * data.unit_ns) / 1e6).toFixed(4);
  const toUnits = (text) => (Number(text) * 1e6) / data.unit_ns;
  function state() {
    const all = panels[0].step === null, whole_ = view.lo <= 0 && view.hi >= furthest();
    const it = pinned && timesOf(pinned), step = it && stepAt((it[0] + it[1]) / 2);
    return {
      anchor: "timeline",
      step: all ? "all" : pinned && !all && panels.length > 1 ? panels[0].step.step : panels[0].step.step ?? undefined,
      with: panels.length > 1 ? panels[1].step.step : undefined,
      ranks: preset.value === "chosen" ? spelt(shown.map((lane) => data.lanes[lane].rank)) : preset.value === "0" ? undefined : `preset${preset.value}`,
      keep: kept.size ? spelt([...kept].map((lane) => data.lanes[lane].rank)) : undefined,
      from: whole_ ? undefined : inMs(view.lo),
      to: whole_ ? undefined : inMs(view.hi),
      rank: it ? data.lanes[pinned.lane].rank : undefined,
      row: it ? rowsOf[pinned.lane].indexOf(rowOf(pinned)) : undefined,
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
    if (asked.keep) { kept.clear(); for (const lane of lanesOf(asked.keep)) kept.add(lane); }
    if (/^preset\d+$/.test(asked.ranks || "") && data.presets[Number(asked.ranks.slice(6))]) openPreset(Number(asked.ranks.slice(6)));
    else if (asked.ranks) openLanes(lanesOf(asked.ranks));
    const [from, to] = [toUnits(asked.from), toUnits(asked.to)];
    if (to > from) look(from, to);
    if (rank === undefined) return;
    const lane = data.lanes.findIndex((each) => String(each.rank) === rank);
    if (lane < 0) { announce(`rank ${rank} has no report: it is not in the timeline`); return; }
    if (!shown.includes(lane)) openLanes([...shown, lane]);
    draw();
    scroller.scrollTop = Math.max(0, tops[shown.indexOf(lane)] - TOP - 20);
    const zero = index >= 0 ? data.steps[index].begin : panels[0].zero;
    if (Number.isNaN(toUnits(asked.at))) {
      const it = telling(lane, zero, zero + panels[0].length);
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
  onClick("reset", () => { selection = null; pin(null); choose(); });
  const measure = byId("measure");
  onClick("measure", () => measure.setAttribute("aria-pressed", String(measure.getAttribute("aria-pressed") !== "true")));
  const help = byId("help");
  onClick("helps", () => help.showModal());

  function measured() {
    const said = byId("said");
    if (!selection) { said.textContent = ""; return; }
    const [from, to] = [Math.min(selection.from, selection.to), Math.max(selection.from, selection.to)];
    const button = element("button", { type: "button", textContent: "zoom to it" });
    button.addEventListener("click", zoomToSelection);
    said.replaceChildren(`measured ${ms(to - from)}, from ${ms(from)} to ${ms(to)} `, button);
  }
  function zoomToSelection() {
    if (!selection) return;
    const { from, to } = selection;
    selection = null;
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
    const panel = panels.find((each) => Math.min(...fingers.values()) <= each.right) || panels[0];
    drag = null;
    show(null);
    pinch = { left: panel.left, wide: panel.right - panel.left };
    pinch.moments = apart().map((at) => view.lo + at * span());
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
    const panel = panels.find((each) => px >= each.left && px <= each.right) || panels[0];
    const select = event.shiftKey || measure.getAttribute("aria-pressed") === "true";
    drag = { at: event.clientX, panel, select: select && px >= size.gutter, moved: false, ...view };
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
        selection = { from: moment(drag.at), to: moment(event.clientX) };
        measured();
        ask();
        return;
      }
      canvas.classList.add("dragging");
      const by = ((drag.at - event.clientX) / (drag.panel.right - drag.panel.left)) * (drag.hi - drag.lo);
      look(drag.lo + by, drag.hi + by);
      return;
    }
    canvas.style.cursor = px < size.gutter ? "pointer" : "";
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
    const index = shown.findIndex((_, at) => down >= tops[at] - 4 && down < tops[at + 1] - 4);
    if (px < size.gutter) { if (index >= 0 && py >= TOP - 6) keep(shown[index]); return; }
    pin(under(px, py));
    if (event.pointerType === "touch") show(null);
  });
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => show(null));
  canvas.addEventListener("dblclick", (event) => {
    const [px] = offset(event), panel = panels.find((each) => px >= each.left && px <= each.right);
    touched = true;
    if (panel) zoom(.4, time(panel, px) - panel.zero);
  });
  canvas.addEventListener("wheel", (event) => {
    // A plain wheel scrolls the page; zooming takes a modifier or a pinch.
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const [px] = offset(event), panel = panels.find((each) => px >= each.left && px <= each.right) || panels[0];
    touched = true;
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * .004))), time(panel, px) - panel.zero);
  }, { passive: false });
  scroller.addEventListener("scroll", () => { show(null); ask(); });

  const onMinimap = (event) => {
    if (!event.buttons) return;
    const box = minimap.getBoundingClientRect();
    const about = ((event.clientX - box.left - size.gutter) / (size.width - size.gutter - 8)) * panels[0].length;
    touched = true;
    look(about - span() / 2, about + span() / 2);
  };
  minimap.addEventListener("pointerdown", onMinimap);
  minimap.addEventListener("pointermove", onMinimap);

  let cursor = null;
  const acts = {
    "+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), w: () => zoom(.7), s: () => zoom(1 / .7),
    a: () => move(-.2), d: () => move(.2), 0: () => choose(), "/": () => search.focus(),
    m: () => measure.click(), Enter: () => (selection ? zoomToSelection() : pin(pointed || cursor)),
    p: () => { const it = pinned || pointed; if (it) keep(it.lane); },
    Escape: () => { cursor = null; selection = null; measured(); show(null); pin(null); },
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
    cursor = cursor || (pinned && { ...pinned });
    if (!cursor) {
      const call = begin.findIndex((at, index) => at >= panels[0].zero + view.lo && shown.includes(data.lane[index]));
      if (call >= 0) return { lane: data.lane[call], call, span: -1 };
      const row = shown.length ? rowsOf[shown[0]][0] : null;
      return row && row.range ? { lane: shown[0], call: -1, span: firstSpan(row.range, panels[0].zero + view.lo) } : null;
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
      const rows = shown.flatMap((lane) => rowsOf[lane].map((each) => [lane, each]));
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
    let panel = panels.find((each) => to >= each.zero + view.lo && from <= each.zero + view.hi);
    if (!panel) {
      panel = panelOf(from);
      look(from - panel.zero - wide / 2, from - panel.zero + wide / 2);
    }
    const index = shown.indexOf(cursor.lane);
    if (index < 0) { openLanes([...shown, cursor.lane]); }
    const top = tops[shown.indexOf(cursor.lane)];
    if (top - scroller.scrollTop < TOP || top - scroller.scrollTop > size.height - 60) scroller.scrollTop = top - TOP - 20;
    const box = canvas.getBoundingClientRect(), around = holder.getBoundingClientRect();
    const down = top - scroller.scrollTop + rowOf(cursor).top + box.top - around.top;
    announcement.textContent = show(cursor, Math.max(x(panel, from), size.gutter), down);
  }

  new ResizeObserver(layout).observe(holder);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ask);
  onPrint(() => { layout(); draw(); });
  chooser.value = String(data.typical);
  // Two steps side by side need the width of two.
  beside.value = data.worst >= 0 && holder.clientWidth >= 800 ? String(data.worst) : "";
  preset.value = "0";
  shown = [...data.presets[0].lanes];
  choose();
  layout();
  draw();
  clusterprof.onState(restore);
  document.documentElement.dataset.timeline = "drawn";
})();
