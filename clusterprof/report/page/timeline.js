// The timeline of collectives by rank.
(() => {
  const { css, bytes } = clusterprof;
  const data = clusterprof.data("timeline-data");
  const canvas = document.getElementById("canvas");
  if (!data || !canvas) return;
  const context = canvas.getContext("2d");
  const tip = document.getElementById("tip");
  const announcement = document.getElementById("announcement");
  const chooser = document.getElementById("step");
  const holder = document.getElementById("drawing");
  const ROW = 16, GAP = 10, TOP = 26, LEAST = 20;

  // Absolute times, and for each collective the range of its calls.
  const last = [], first = [0], of = [];
  data.last.reduce((sum, more, index) => (last[index] = sum + more), 0);
  data.members.forEach((count, index) => {
    first.push(first[index] + count);
    for (let k = 0; k < count; k++) of.push(index);
  });
  const begin = data.wait.map((wait, call) => last[of[call]] - wait);
  const end = data.length.map((length, call) => begin[call] + length);
  const tops = [TOP];
  for (const lane of data.lanes) tops.push(tops[tops.length - 1] + lane.rows * ROW + GAP);
  const whole = { lo: data.steps[0].begin, hi: data.steps[data.steps.length - 1].end };

  let view = { lo: 0, hi: 1 };
  let chosen = -1;
  let size = { width: 0, gutter: 0, height: tops[tops.length - 1] };
  let waiting = false;

  data.steps.forEach((step, index) => {
    const name = step.step === null ? "the whole window" : `step ${step.step}`;
    chooser.add(new Option(name + (step.steady ? "" : " (not steady)"), String(index)));
  });
  if (data.steps.length > 1) chooser.add(new Option("all steps", "all"));

  const x = (time) => size.gutter + ((time - view.lo) / (view.hi - view.lo)) * (size.width - size.gutter);
  const time = (px) => view.lo + ((px - size.gutter) / (size.width - size.gutter)) * (view.hi - view.lo);
  const ms = (units, decimals) => clusterprof.ms(units * data.unit_ns, decimals);

  function ask() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  }

  function draw() {
    const tones = Object.fromEntries(
      ["ink", "soft", "line", "track", "wait", "transfer", "late"].map((name) => [name, css(`--${name}`)]));
    const ratio = window.devicePixelRatio || 1;
    size.width = holder.clientWidth;
    size.gutter = size.width < 560 ? 58 : 74;
    canvas.width = Math.round(size.width * ratio);
    canvas.height = Math.round(size.height * ratio);
    canvas.style.height = `${size.height}px`;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, size.width, size.height);
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    lanes(tones);
    scale(tones);
    context.save();
    context.beginPath();
    context.rect(size.gutter, 0, size.width - size.gutter, size.height);
    context.clip();
    bars(tones);
    if (chosen >= 0) pointer(tones);
    context.restore();
  }

  function lanes(tones) {
    data.lanes.forEach((lane, index) => {
      context.globalAlpha = .6;
      context.fillStyle = tones.track;
      context.fillRect(size.gutter, tops[index] - 3, size.width - size.gutter, lane.rows * ROW + 4);
      context.globalAlpha = 1;
      context.fillStyle = lane.named ? tones.late : tones.ink;
      context.textAlign = "left";
      context.fillText(`rank ${lane.rank}`, 12, tops[index] + (lane.rows * ROW) / 2 - 1);
    });
  }

  // Ticks count from the begin of the step in view, so that steps can be compared.
  function scale(tones) {
    const zero = data.steps.reduce((found, step) => (step.begin <= view.lo + 1 ? step.begin : found), whole.lo);
    const rough = (view.hi - view.lo) / Math.max(2, Math.floor((size.width - size.gutter) / 80));
    const power = 10 ** Math.floor(Math.log10(rough));
    const every = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    const decimals = Math.max(0, Math.min(4, -Math.floor(Math.log10((every * data.unit_ns) / 1e6) + 1e-9)));
    context.fillStyle = tones.soft;
    context.strokeStyle = tones.line;
    context.textAlign = "center";
    for (let k = Math.ceil((view.lo - zero) / every); zero + k * every <= view.hi; k++) {
      const at = Math.round(x(zero + k * every)) + .5;
      context.beginPath();
      context.moveTo(at, TOP - 6);
      context.lineTo(at, size.height - GAP + 2);
      context.stroke();
      if (at > size.gutter + 8 && at < size.width - 28) context.fillText(ms(k * every, decimals), at, 9);
    }
    context.strokeStyle = tones.soft;
    for (const step of data.steps) {
      const at = Math.round(x(step.begin)) + .5;
      if (at < size.gutter || at > size.width) continue;
      context.setLineDash([3, 3]);
      context.beginPath();
      context.moveTo(at, TOP - 6);
      context.lineTo(at, size.height - GAP + 2);
      context.stroke();
      context.setLineDash([]);
    }
  }

  function bars(tones) {
    const drawn = new Map();
    const marks = [];
    for (let call = 0; call < begin.length; call++) {
      if (end[call] < view.lo || begin[call] > view.hi) continue;
      const group = of[call], lane = data.lane[call];
      const left = x(begin[call]), right = x(end[call]);
      const top = tops[lane] + data.row[call] * ROW;
      const late = data.late[group] === lane;
      // What is narrower than a pixel and falls on one already drawn would not be seen.
      const key = lane * 8 + data.row[call];
      if (right - left < 1 && !late && chosen !== group && (drawn.get(key) ?? -1) >= right) continue;
      drawn.set(key, Math.max(drawn.get(key) ?? -1, left + 1));
      context.globalAlpha = chosen < 0 || chosen === group ? 1 : .4;
      if (data.alone[group]) {
        context.strokeStyle = tones.soft;
        context.strokeRect(left + .5, top + .5, Math.max(right - left - 1, .5), ROW - 5);
      } else {
        const turn = Math.min(Math.max(x(last[group]), left), right);
        context.fillStyle = tones.wait;
        if (turn - left > .05) context.fillRect(left, top, Math.max(turn - left, .5), ROW - 3);
        context.fillStyle = tones.transfer;
        context.fillRect(turn, top, Math.max(right - turn, .75), ROW - 3);
      }
      // Zooming in shows the marks of smaller delays; at a distance they would hide the large.
      if (late && x(last[group]) - x(last[group] - data.margin[group]) >= 3) marks.push([x(last[group]), top, group]);
    }
    context.fillStyle = tones.late;
    for (const [at, top, group] of marks) {
      context.globalAlpha = chosen < 0 || chosen === group ? 1 : .4;
      context.fillRect(at - 1, top - 2, 2, ROW + 1);
      context.beginPath();
      context.moveTo(at, top + 3);
      context.lineTo(at - 4.5, top - 5);
      context.lineTo(at + 4.5, top - 5);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  // The moment that the whole collective waited for, across all lanes.
  function pointer(tones) {
    const at = x(last[chosen]);
    context.strokeStyle = data.late[chosen] >= 0 ? tones.late : tones.ink;
    context.beginPath();
    context.moveTo(at, TOP - 6);
    context.lineTo(at, size.height - GAP + 2);
    context.stroke();
    context.strokeStyle = tones.ink;
    for (let call = first[chosen]; call < first[chosen + 1]; call++) {
      const top = tops[data.lane[call]] + data.row[call] * ROW;
      context.strokeRect(x(begin[call]) - .5, top - .5, Math.max(x(end[call]) - x(begin[call]), 1) + 1, ROW - 2);
    }
  }

  function facts(call) {
    const group = of[call], lane = data.lane[call];
    const name = data.operations[data.operation[group]] || "collective";
    const zero = data.steps.reduce((found, step) => (step.begin <= last[group] ? step : found), data.steps[0]);
    const rows = [["bytes", bytes(data.bytes[group])]];
    const place = zero.step === null ? "" : ` in step ${zero.step}`;
    rows.push([`arrival${place}`, ms(begin[call] - zero.begin)]);
    if (data.alone[group]) {
      rows.push(["length", ms(data.length[call])]);
    } else {
      const waited = `${ms(Math.max(data.wait[call], 0))} ±${ms(data.bound[group])}`;
      rows.push(["wait", data.bound[group] < 0 ? "unknown" : waited]);
      rows.push(["transfer", ms(Math.max(data.length[call] - Math.max(data.wait[call], 0), 0))]);
      const late = data.late[group];
      rows.push(late < 0
        ? ["last", "none beyond the uncertainty"]
        : ["last", `rank ${data.lanes[late].rank}, by ${ms(data.margin[group])}`]);
    }
    if (data.communicators[data.communicator[group]]) {
      const id = data.communicators[data.communicator[group]];
      rows.push(["communicator", data.order[group] < 0 ? id : `${id}, number ${data.order[group]}`]);
    }
    const state = data.states[data.state[group]];
    if (state) rows.push(["match", data.confidence[group] < 0 ? state : `${state}, ${data.confidence[group]}%`]);
    return [`${name} on rank ${data.lanes[lane].rank}`, rows];
  }

  function show(call, px, py) {
    chosen = call < 0 ? -1 : of[call];
    ask();
    if (call < 0) { tip.style.visibility = "hidden"; return ""; }
    const [title, rows] = facts(call);
    const list = document.createElement("dl");
    for (const [name, value] of rows) {
      list.append(Object.assign(document.createElement("dt"), { textContent: name }),
        Object.assign(document.createElement("dd"), { textContent: value }));
    }
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: title }), list);
    const widest = holder.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(px + 16, widest))}px`;
    // Under a low drawing the tip hides no lane; in a tall one it stays near the pointer.
    const low = holder.offsetHeight < 320;
    tip.style.top = `${low ? holder.offsetHeight + 6 : Math.min(py + 18, holder.offsetHeight + 6)}px`;
    tip.style.visibility = "visible";
    return `${title}: ${rows.map(([name, value]) => `${name} ${value}`).join(", ")}`;
  }

  function under(px, py) {
    const lane = data.lanes.findIndex((_, index) => py >= tops[index] - 4 && py < tops[index + 1] - 4);
    if (lane < 0 || px < size.gutter) return -1;
    const row = Math.floor((py - tops[lane]) / ROW);
    let best = -1, distance = 4;
    for (let call = 0; call < begin.length; call++) {
      if (data.lane[call] !== lane || (data.lanes[lane].rows > 1 && data.row[call] !== row)) continue;
      const off = Math.max(x(begin[call]) - px, px - x(end[call]), 0);
      if (off < distance) { distance = off; best = call; }
      if (off === 0) break;
    }
    return best;
  }

  function look(lo, hi) {
    const span = Math.max(hi - lo, LEAST), all = (whole.hi - whole.lo) * 1.02;
    if (span >= all) view = { lo: whole.lo, hi: whole.lo + all };
    else {
      lo = Math.max(whole.lo - span * .02, Math.min(lo, whole.hi - span * .9));
      view = { lo, hi: lo + span };
    }
    show(-1);
  }

  function zoom(factor, about = (view.lo + view.hi) / 2) {
    look(about - (about - view.lo) * factor, about + (view.hi - about) * factor);
  }

  function choose() {
    const step = data.steps[Number(chooser.value)];
    if (step) look(step.begin, step.end);
    else look(whole.lo, whole.hi);
  }

  chooser.addEventListener("change", choose);
  const onClick = (id, act) => document.getElementById(id).addEventListener("click", act);
  onClick("earlier", () => look(view.lo - (view.hi - view.lo) / 2, view.hi - (view.hi - view.lo) / 2));
  onClick("later", () => look(view.lo + (view.hi - view.lo) / 2, view.hi + (view.hi - view.lo) / 2));
  onClick("closer", () => zoom(.5));
  onClick("farther", () => zoom(2));
  onClick("reset", choose);

  const offset = (event) => {
    const box = canvas.getBoundingClientRect(), around = holder.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top, event.clientX - around.left, event.clientY - around.top];
  };
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { at: event.clientX, ...view };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag && Math.abs(event.clientX - drag.at) > 2) {
      canvas.classList.add("dragging");
      const by = ((drag.at - event.clientX) / (size.width - size.gutter)) * (drag.hi - drag.lo);
      look(drag.lo + by, drag.hi + by);
      return;
    }
    const [px, py, tx, ty] = offset(event);
    show(under(px, py), tx, ty);
  });
  const release = () => { drag = null; canvas.classList.remove("dragging"); };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => show(-1));
  canvas.addEventListener("dblclick", (event) => zoom(.4, time(offset(event)[0])));
  canvas.addEventListener("wheel", (event) => {
    // A plain wheel scrolls the page; zooming takes a modifier or a pinch.
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * .004))), time(offset(event)[0]));
  }, { passive: false });

  let cursor = -1;
  canvas.addEventListener("keydown", (event) => {
    const key = event.key;
    if (key === "+" || key === "=") zoom(.5);
    else if (key === "-") zoom(2);
    else if (key === "Escape") { cursor = -1; show(-1); }
    else if (key.startsWith("Arrow")) { cursor = step(key); speak(); }
    else return;
    event.preventDefault();
  });

  // Left and right walk along a rank's calls, up and down through one collective's ranks.
  function step(key) {
    if (cursor < 0) return begin.findIndex((at) => at >= view.lo);
    if (key === "ArrowUp" || key === "ArrowDown") {
      const members = [];
      for (let call = first[of[cursor]]; call < first[of[cursor] + 1]; call++) members.push(call);
      members.sort((one, other) => data.lane[one] - data.lane[other]);
      const next = members.indexOf(cursor) + (key === "ArrowDown" ? 1 : -1);
      return members[Math.max(0, Math.min(members.length - 1, next))];
    }
    const by = key === "ArrowRight" ? 1 : -1;
    for (let call = cursor + by; call >= 0 && call < begin.length; call += by) {
      if (data.lane[call] === data.lane[cursor]) return call;
    }
    return cursor;
  }

  function speak() {
    if (cursor < 0) return;
    const span = view.hi - view.lo;
    if (end[cursor] < view.lo || begin[cursor] > view.hi) look(begin[cursor] - span / 2, begin[cursor] + span / 2);
    const box = canvas.getBoundingClientRect(), around = holder.getBoundingClientRect();
    const down = tops[data.lane[cursor]] + data.row[cursor] * ROW + box.top - around.top;
    announcement.textContent = show(cursor, Math.max(x(begin[cursor]), size.gutter), down);
  }

  new ResizeObserver(ask).observe(holder);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ask);
  chooser.value = String(data.typical);
  choose();
  draw();
  document.documentElement.dataset.timeline = "drawn";
})();
