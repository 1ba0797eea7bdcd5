// Draws the timeline: the lanes on a canvas, and the minimap above it. `scene` is what is shown
// (timeline.js says what is in it); what is drawn fits what the element `drawing` has of the page.
clusterprof.painter = (timeline, scene) => {
  const { css, element, density, onPaper } = clusterprof;
  const {
    data, whole, last, first, of, begin, end, S, spanBegin, spanEnd, KINDS, kindOf, IDLE, WHAT, rowsOf,
    ms, stepName, wordOf, laneName, firstSpan, timesOf, rowOf,
  } = timeline;
  const [canvas, minimap, scroller, filler, holder] =
    ["canvas", "minimap", "lanes", "filler", "drawing"].map((id) => document.getElementById(id));
  const context = canvas.getContext("2d");
  const TOP = 40, GAP = 12, PAGE = 1500;
  let waiting = false, tones = null;

  const span = () => scene.view.hi - scene.view.lo;
  const x = (panel, time) => panel.left + ((time - panel.zero - scene.view.lo) / span()) * (panel.right - panel.left);
  const time = (panel, px) => panel.zero + scene.view.lo + ((px - panel.left) / (panel.right - panel.left)) * span();

  function ask() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  }

  function layout() {
    const rest = scene.shown.filter((lane) => !scene.kept.has(lane));
    scene.shown = [...scene.shown.filter((lane) => scene.kept.has(lane)), ...rest];
    scene.tops = [TOP];
    for (const lane of scene.shown) scene.tops.push(scene.tops[scene.tops.length - 1] + rowsOf[lane].height + GAP);
    scene.size.total = scene.tops[scene.tops.length - 1];
    scene.size.height = Math.min(scene.size.total, onPaper() ? PAGE : Math.max(260, Math.round(innerHeight * .76)));
    canvas.style.height = `${scene.size.height}px`;
    scroller.style.maxHeight = `${scene.size.height}px`;
    filler.style.height = `${scene.size.total - scene.size.height}px`;
    ask();
  }

  // Where the panels stand.
  function fit() {
    scene.size.width = holder.clientWidth;
    scene.size.gutter = scene.size.width < 560 ? 106 : 128;
    const each = (scene.size.width - scene.size.gutter - 8 - 14 * (scene.panels.length - 1)) / scene.panels.length;
    scene.panels.forEach((panel, index) => {
      panel.left = scene.size.gutter + index * (each + 14);
      panel.right = panel.left + each;
    });
  }

  function draw() {
    const names = ["ink", "soft", "line", "track", "card", "late", "idle", "compute", "wait", "transfer", "copy",
      "range", "cuda", "cuda_wait", "blocked", "thread_wait", "python", "op", "page"];
    tones = Object.fromEntries(names.map((name) => [name, css(`--${name === "copy" ? "copies" : name}`)]));
    const ratio = density();
    fit();
    if (scene.size.width <= scene.size.gutter) return;  // hidden
    canvas.width = Math.round(scene.size.width * ratio);
    canvas.height = Math.round(scene.size.height * ratio);
    const scrolled = scroller.scrollTop;
    const inView = scene.shown.map((lane, index) => [lane, scene.tops[index] - scrolled])
      .filter(([lane, top]) => top + rowsOf[lane].height >= TOP && top <= scene.size.height);
    drawStill(inView, ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.textBaseline = "middle";
    for (const panel of scene.panels) {
      inside(panel, TOP - 6, () => {
        for (const [lane, top] of inView) for (const row of rowsOf[lane]) if (row.calls) drawCalls(panel, lane, row, top + row.top);
      });
      inside(panel, TOP, () => overlays(panel, scrolled));
    }
    context.fillStyle = tones.card;
    context.fillRect(0, 0, scene.size.width, TOP - 6);
    for (const panel of scene.panels) scale(panel);
    drawMinimap();
  }

  // All but the calls changes with the view only: it is kept as a picture, since pointing at things
  // draws some sixty times a second.
  const still = { of: "", picture: element("canvas") };
  function drawStill(inView, ratio) {
    const drawn = JSON.stringify([scene.view, scene.panels, inView, [...scene.kept], scene.size, ratio, tones]);
    if (drawn === still.of) { context.drawImage(still.picture, 0, 0); return; }
    tones.hatch = hatched(tones);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.textBaseline = "middle";
    for (const panel of scene.panels) inside(panel, TOP - 6, () => grid(panel));
    for (const [lane, top] of inView) drawLane(lane, top);
    still.of = drawn;
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
    context.rect(panel.left, top, panel.right - panel.left, scene.size.height - top);
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
    context.fillText((scene.kept.has(lane) ? "▪ " : "") + `rank ${rank}`, 8, top + 8);
    font(10);
    context.fillStyle = tones.soft;
    const narrow = scene.size.width < 560;
    if (host && rows.length > 1) context.fillText(host.slice(0, narrow ? 7 : 12), 8, top + 23);
    context.textAlign = "right";
    for (const row of rows) {
      context.fillStyle = tones.soft;
      // beside a long name there is no space for its first row's
      if (narrow && (rows.length === 1 || (row === rows[0] && rank > 99))) continue;
      context.fillText(row.label.slice(0, narrow ? 8 : 10), scene.size.gutter - 6, top + row.top + row.height / 2);
    }
    for (const panel of scene.panels) {
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
    const from = panel.zero + scene.view.lo, to = panel.zero + scene.view.hi, scale = (panel.right - panel.left) / span();
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

  const chosen = () => { const it = scene.pointed || scene.pinned; return it && it.call >= 0 ? of[it.call] : -1; };

  function drawCalls(panel, lane, row, top) {
    const from = panel.zero + scene.view.lo, to = panel.zero + scene.view.hi, lit = chosen();
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
    for (const it of [scene.pinned, scene.pointed]) if (it) outline(panel, it, scrolled);
    context.lineWidth = 1;
    if (scene.selection) {
      const left = x(panel, panel.zero + Math.min(scene.selection.from, scene.selection.to)), right = x(panel, panel.zero + Math.max(scene.selection.from, scene.selection.to));
      context.globalAlpha = .18;
      context.fillStyle = tones.ink;
      context.fillRect(left, TOP - 6, right - left, scene.size.height);
      context.globalAlpha = 1;
      context.strokeStyle = tones.ink;
      line(left);
      line(right);
    }
  }

  function line(at) {
    context.beginPath();
    context.moveTo(at, TOP - 6);
    context.lineTo(at, scene.size.height);
    context.stroke();
  }

  function outline(panel, it, scrolled) {
    const index = scene.shown.indexOf(it.lane);
    if (index < 0) return;
    const row = rowOf(it), [from, to] = timesOf(it), left = x(panel, from), right = x(panel, to);
    if (right < panel.left || left > panel.right) return;
    context.strokeRect(left - .5, scene.tops[index] - scrolled + row.top - .5, Math.max(right - left, 1) + 1, row.height);
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
    for (let k = Math.ceil(scene.view.lo / every); k * every <= scene.view.hi; k++) line(Math.round(x(panel, panel.zero + k * every)) + .5);
  }

  // Ticks count from the begin of the step in view, so that steps can be compared.
  function scale(panel) {
    const all = panel.step === null;
    const zero = panel.zero, every = tick(panel);
    const decimals = Math.max(0, Math.min(4, -Math.floor(Math.log10((every * data.unit_ns) / 1e6) + 1e-9)));
    font(11, 600);
    context.fillStyle = tones.ink;
    context.textAlign = "left";
    const title = all ? "all steps" : stepName(panel.step) + (scene.panels.length > 1 ? wordOf(panel.step) : "");
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
    for (let k = Math.ceil(scene.view.lo / every); k * every <= scene.view.hi; k++) {
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
      context.lineTo(Math.round(at) + .5, scene.size.height);
      context.stroke();
    }
    context.setLineDash([]);
    context.fillStyle = tones.ink;
    if (endAt > panel.left + 30 && endAt <= panel.right + 1) {
      context.textAlign = "right";
      context.fillText(`last end ${clusterprof.ms(stop * data.unit_ns, 2).replace(" ms", "")}`, Math.min(endAt, panel.right) - 3, 25);
    }
    if (scene.view.lo <= 0 && scene.view.hi > 0) {
      context.textAlign = "left";
      context.fillText("0", Math.max(x(panel, zero), panel.left) + 2, 25);
    }
  }

  // The whole step of the first lane in view, with the window on it.
  const overview = { of: "", picture: null };
  function drawMinimap() {
    const ratio = density(), ink = minimap.getContext("2d"), panel = scene.panels[0];
    const tall = 22, wide = scene.size.width - scene.size.gutter - 8, until = panel.length;
    minimap.width = Math.round(scene.size.width * ratio);
    minimap.height = Math.round(tall * ratio);
    ink.setTransform(ratio, 0, 0, ratio, 0, 0);
    const lane = scene.shown.find((each) => data.lanes[each].named) ?? scene.shown[0];
    const row = lane === undefined ? null : rowsOf[lane].find((each) => each.name === "device");
    const at = (moment) => scene.size.gutter + Math.max(0, Math.min(1, moment / until)) * wide;
    // Its bars change with the step, the lane and the width only.
    const now = [lane, panel.zero, until, scene.size.width, ratio, tones.compute].join();
    if (now !== overview.of) {
      Object.assign(overview, { of: now, picture: element("canvas", { width: minimap.width, height: minimap.height }) });
      const bars = overview.picture.getContext("2d");
      bars.setTransform(ratio, 0, 0, ratio, 0, 0);
      bars.fillStyle = tones.track;
      bars.fillRect(scene.size.gutter, 4, wide, tall - 8);
      for (let k = row ? firstSpan(row.range, panel.zero) : 0; row && k < row.range[1] && spanBegin[k] < panel.zero + until; k++) {
        if (kindOf[k] === IDLE) continue;
        const left = at(spanBegin[k] - panel.zero);
        bars.fillStyle = tones[KINDS[kindOf[k]]];
        bars.fillRect(left, 4, Math.max(at(spanEnd[k] - panel.zero) - left, .25), tall - 8);
      }
    }
    ink.drawImage(overview.picture, 0, 0, scene.size.width, tall);
    ink.fillStyle = tones.soft;
    ink.font = `10px ${getComputedStyle(document.body).fontFamily}`;
    ink.textBaseline = "middle";
    ink.textAlign = "right";
    if (lane !== undefined) ink.fillText(scene.size.width < 560 ? laneName(lane) : `device of ${laneName(lane)}`, scene.size.gutter - 6, tall / 2);
    ink.strokeStyle = tones.ink;
    ink.lineWidth = 1.5;
    const left = at(scene.view.lo);
    ink.strokeRect(left + .75, 1.5, Math.max(at(scene.view.hi) - left - 1.5, 3), tall - 3);
  }

  return { TOP, ask, layout, draw, fit, span, x, time };
};
