// The heatmap of ranks and steps. A row is a rank, or the highest of several where there are more
// ranks than lines; a click or Enter shows the rank and the step in the timeline.
(() => {
  "use strict";
  const { element, css, ms, go, onState, density, onPrint } = clusterprof;
  const data = clusterprof.data("heatmap-data");
  if (!data) return;
  const canvas = document.getElementById("heatmap"), scale = document.getElementById("heat-scale");
  const read = document.getElementById("heat-read"), order = document.getElementById("heat-order");
  const linked = document.getElementById("timeline-data") !== null;
  const UNKNOWN = 65535, TOP = 22, MOST_HEIGHT = 384, ROW = 22, MARK = 12, PALE = .35;

  const codes = (text) => {
    const raw = atob(text), out = new Uint16Array(raw.length / 2);
    for (let at = 0; at < out.length; at++) out[at] = raw.charCodeAt(2 * at) | (raw.charCodeAt(2 * at + 1) << 8);
    return out;
  };
  for (const each of data.measures) each.codes = codes(each.values);

  const named = new Set(data.named), profiled = new Set(data.profiled);
  let measure = data.measures[data.first];
  // Lines of the picture: each the places (in `data.ranks`) of the ranks that it shows, and the
  // labels that stand before the first line of a group.
  let lines = [], labels = new Map(), grouping = null;
  let size = { width: 0, height: 0, left: 60, cell: 1, row: 1 };
  let cursor = null, pinned = null, small = null;

  const value = (place, column) => {
    const code = measure.codes[place * measure.steps.length + column];
    return code === UNKNOWN ? NaN : code * measure.unit_ns;
  };
  // The rank of a line that is highest in a step, and how high.
  const peak = (line, column) => {
    let best = lines[line][0], most = NaN;
    for (const place of lines[line]) {
      const ns = value(place, column);
      if (!(ns <= most) && !Number.isNaN(ns)) { best = place; most = ns; }
    }
    return [best, most];
  };
  const total = (place) => {
    let sum = 0;
    for (let column = 0; column < measure.steps.length; column++) sum += value(place, column) || 0;
    return sum;
  };

  function arrange() {
    const places = data.ranks.map((_, place) => place);
    grouping = data.groupings.find((each) => each.name === order.value) || null;
    if (grouping) {
      const last = grouping.labels.length;
      places.sort((one, other) => ((grouping.of[one] + last + 1) % (last + 1)) - ((grouping.of[other] + last + 1) % (last + 1)) || one - other);
    } else if (order.value === "value") {
      const sums = places.map(total);
      places.sort((one, other) => sums[other] - sums[one] || one - other);
    }
    const known = places.filter((place) => measure.codes.subarray(place * measure.steps.length, (place + 1) * measure.steps.length).some((code) => code !== UNKNOWN));
    const many = Math.ceil(known.length / MOST_HEIGHT);
    lines = [];
    small = null;
    labels = new Map();
    let group = null;
    for (const place of known) {
      const mine = grouping ? grouping.of[place] : 0;
      const open = lines[lines.length - 1];
      if (open && open.length < many && mine === group) open.push(place);
      else {
        if (grouping && mine !== group) labels.set(lines.length, mine < 0 ? "other" : grouping.labels[mine]);
        lines.push([place]);
      }
      group = mine;
    }
  }

  // One hue, from the card's own shade to the darkest (in the dark: to the lightest). Steps that the
  // profiler disturbed are pale: what is dark in them is no news of the job.
  function tones() {
    const here = getComputedStyle(canvas), rgb = (name) => here.getPropertyValue(name).match(/\w\w/g).map((part) => parseInt(part, 16));
    const stops = ["--heat-0", "--heat-1", "--heat-2", "--heat-3"].map(rgb);
    return (share, pale = false) => {
      const at = Math.max(0, Math.min(.9999, share)) * (stops.length - 1), first = Math.floor(at), part = at - first;
      const full = stops[first].map((from, k) => Math.round(from + (stops[first + 1][k] - from) * part));
      return pale ? full.map((each, k) => Math.round(stops[0][k] + (each - stops[0][k]) * PALE)) : full;
    };
  }
  const share = (ns) => (ns - measure.low_ns) / Math.max(measure.high_ns - measure.low_ns, 1);
  const digits = (ns) => ((ns / 1e6) >= 99.5 ? 0 : (ns / 1e6) >= 9.95 ? 1 : 2);

  // All cells as one small picture, which the canvas enlarges: fast at any number of ranks.
  function enlarged(tone, columns) {
    const picture = element("canvas", { width: columns, height: lines.length });
    const image = new ImageData(columns, lines.length);
    for (let line = 0; line < lines.length; line++) {
      for (let column = 0; column < columns; column++) {
        const [, ns] = peak(line, column), at = 4 * (line * columns + column);
        if (Number.isNaN(ns)) continue;
        image.data.set([...tone(share(ns), measure.unsteady.includes(column)), 255], at);
      }
    }
    picture.getContext("2d").putImageData(image, 0, 0);
    return picture;
  }

  function draw() {
    const width = canvas.clientWidth, ratio = density();
    if (!width) return;
    const context = canvas.getContext("2d");
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const texts = grouping ? [...labels.values()] : lines.map((line) => String(data.ranks[line[0]]));
    const widest = texts.reduce((most, text) => Math.max(most, context.measureText(text.slice(0, 18)).width), 24);
    const columns = measure.steps.length;
    const left = Math.ceil(widest) + 14 + MARK;
    const row = lines.length <= 20 ? ROW : Math.max(1, Math.floor((MOST_HEIGHT - TOP) / lines.length));
    const cell = (width - left - 2) / columns;
    size = { width, left, row, cell, height: TOP + row * lines.length + 4 };
    canvas.style.height = `${size.height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(size.height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const tone = tones(), soft = css("--soft"), ink = css("--ink"), track = css("--track");

    if (!small) small = enlarged(tone, columns);
    context.fillStyle = track;
    context.fillRect(left, TOP, cell * columns, row * lines.length);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, left, TOP, cell * columns, row * lines.length);

    context.textBaseline = "middle";
    if (row >= 6 && cell >= 6) {
      context.strokeStyle = css("--card");
      context.beginPath();
      for (let line = 0; line <= lines.length; line++) { context.moveTo(left, TOP + line * row); context.lineTo(left + cell * columns, TOP + line * row); }
      for (let column = 0; column <= columns; column++) { context.moveTo(left + column * cell, TOP); context.lineTo(left + column * cell, TOP + row * lines.length); }
      context.stroke();
    }
    // Steps that the profiler disturbed are marked above, and hatched in the picture.
    const unsteady = new Set(measure.unsteady);
    for (const column of unsteady) hatch(context, left + column * cell, TOP, cell, row * lines.length, css("--card"));
    if (row >= 15 && cell >= 44) {
      context.textAlign = "center";
      for (let line = 0; line < lines.length; line++) {
        for (let column = 0; column < columns; column++) {
          const [, ns] = peak(line, column);
          if (Number.isNaN(ns)) continue;
          const [r, g, b] = tone(share(ns), unsteady.has(column));
          // whichever has more contrast with the cell
          const light = .2126 * (r / 255) ** 2.2 + .7152 * (g / 255) ** 2.2 + .0722 * (b / 255) ** 2.2;
          context.fillStyle = light > .19 ? "#0b1016" : "#ffffff";
          const text = (ns / 1e6).toFixed(digits(measure.high_ns)), x = left + (column + .5) * cell, y = TOP + (line + .5) * row;
          // the hatching does not cross it
          if (unsteady.has(column)) {
            context.lineWidth = 4;
            context.strokeStyle = `rgb(${r} ${g} ${b})`;
            context.strokeText(text, x, y);
            context.lineWidth = 1;
          }
          context.fillText(text, x, y);
        }
      }
    }
    const every = Math.max(1, Math.ceil(44 / cell));
    context.textAlign = "center";
    for (let column = 0; column < columns; column++) {
      if (column % every) continue;
      context.fillStyle = soft;
      const text = (column ? "" : cell > 60 ? "step " : "") + measure.steps[column];
      context.fillText(unsteady.has(column) && cell > 100 ? `${text} (not steady)` : text, left + (column + .5) * cell, 11);
    }
    context.textAlign = "right";
    let free = 0;
    // The names of flagged ranks come first, the others where there is space between them.
    const flags = grouping ? [] : lines.flatMap((line, at) => line.filter((place) => named.has(place)).slice(0, 1).map((place) => ({ y: TOP + (at + .5) * row, text: String(data.ranks[place]) })));
    context.fillStyle = css("--late");
    for (const flag of flags) context.fillText(flag.text, left - MARK - 2, flag.y);
    for (let line = 0; line < lines.length; line++) {
      const y = TOP + (line + .5) * row, flagged = lines[line].some((place) => named.has(place));
      const group = labels.get(line);
      if (group !== undefined && line) {
        context.strokeStyle = soft;
        context.beginPath(); context.moveTo(MARK, TOP + line * row); context.lineTo(left + cell * columns, TOP + line * row); context.stroke();
      }
      if (flagged) {
        context.fillStyle = css("--late");
        context.beginPath(); context.moveTo(left - 2, y); context.lineTo(left - 10, y - 5); context.lineTo(left - 10, y + 5); context.fill();
      }
      if (y < free) continue;
      const text = grouping ? group : row >= 12 || line % Math.ceil(14 / row) === 0 ? String(data.ranks[lines[line][0]]) : undefined;
      if (text === undefined || flags.some((flag) => Math.abs(flag.y - y) < 12)) continue;
      context.fillStyle = ink;
      context.fillText(text.slice(0, 18), left - MARK - 2, y);
      free = y + 13;
    }
    for (const [mark, style, wide] of [[pinned, ink, 2], [cursor, ink, 1]]) {
      if (!mark) continue;
      const line = lines.findIndex((each) => each.includes(mark.place));
      if (line < 0) continue;
      context.strokeStyle = style;
      context.lineWidth = wide;
      context.strokeRect(left + mark.column * cell + .5, TOP + line * row + .5, Math.max(cell - 1, 2), Math.max(row - 1, 2));
      context.lineWidth = 1;
    }
    legend(tone);
  }

  function hatch(context, x, y, width, height, colour) {
    context.save();
    context.beginPath(); context.rect(x, y, width, height); context.clip();
    context.strokeStyle = colour;
    context.globalAlpha = .6;
    context.beginPath();
    for (let at = -height; at < width; at += 7) { context.moveTo(x + at, y + height); context.lineTo(x + at + height, y); }
    context.stroke();
    context.restore();
  }

  function legend(tone) {
    const context = scale.getContext("2d");
    for (let at = 0; at < scale.width; at++) {
      context.fillStyle = `rgb(${tone(at / (scale.width - 1))})`;
      context.fillRect(at, 0, 1, scale.height);
    }
    document.getElementById("heat-low").textContent = measure.low_ns ? ms(measure.low_ns, digits(measure.high_ns)) : "0";
    document.getElementById("heat-high").textContent = ms(measure.high_ns, digits(measure.high_ns));
  }

  const hostOf = (place) => {
    const hosts = data.groupings.find((each) => each.name === "host");
    return hosts && hosts.of[place] >= 0 ? ` on ${hosts.labels[hosts.of[place]]}` : "";
  };
  function told(mark) {
    const ns = value(mark.place, mark.column), step = measure.steps[mark.column];
    const disturbed = measure.unsteady.includes(mark.column) ? ", not in steady state" : "";
    const shown = profiled.has(mark.place) ? "" : "; this rank was not profiled";
    return `rank ${data.ranks[mark.place]}${hostOf(mark.place)}, step ${step}${disturbed}: ${measure.name} ${Number.isNaN(ns) ? "not known" : ms(ns, digits(measure.high_ns))}${shown}`;
  }
  function highest() {
    let best = null, most = -1;
    for (let place = 0; place < data.ranks.length; place++) {
      for (let column = 0; column < measure.steps.length; column++) {
        const ns = value(place, column);
        if (ns > most && !measure.unsteady.includes(column)) { most = ns; best = { place, column }; }
      }
    }
    return best;
  }
  let top = null;
  function tell() {
    const most = cursor || (top ??= highest());
    read.textContent = most ? (cursor ? "" : "highest: ") + told(most) : "";
  }

  function show() {
    arrange();
    for (const button of document.getElementById("heat-measures").children) button.setAttribute("aria-pressed", String(button.textContent === measure.name));
    document.getElementById("heat-what").textContent = `${measure.what[0].toUpperCase()}${measure.what.slice(1)}. The strongest shade is the most of any steady-state step, a twentieth of a step at least${linked ? "; a click shows the rank and the step in the timeline" : ""}.`;
    const many = Math.max(...lines.map((line) => line.length), 1);
    const left = data.ranks.length - lines.reduce((sum, line) => sum + line.length, 0);
    const notes = [];
    if (many > 1) notes.push(`a line is the highest of ${many} ranks`);
    if (left > 0) notes.push(`${left} of ${data.ranks.length} ranks were not profiled and are left out`);
    if (data.named.length) notes.push("▶ is a rank that a finding names as straggler");
    document.getElementById("heat-note").firstElementChild.textContent = notes.length ? `${notes.join("; ")}.`.replace(/^./, (letter) => letter.toUpperCase()) : "";
    cursor = top = null;
    tell();
    draw();
  }

  function under(event) {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - size.left) / size.cell);
    const line = Math.floor((event.clientY - box.top - TOP) / size.row);
    if (column < 0 || line < 0 || column >= measure.steps.length || line >= lines.length) return null;
    return { place: peak(line, column)[0], column };
  }
  const jump = (mark) => {
    pinned = mark;
    draw();
    go({ anchor: "timeline", rank: data.ranks[mark.place], step: measure.steps[mark.column] });
  };

  canvas.addEventListener("pointermove", (event) => {
    const mark = under(event);
    if (mark && cursor && mark.place === cursor.place && mark.column === cursor.column) return;
    cursor = mark;
    tell();
    draw();
  });
  canvas.addEventListener("pointerleave", () => { cursor = null; tell(); draw(); });
  canvas.addEventListener("click", (event) => { const mark = under(event); if (mark) jump(mark); });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Enter" && cursor) jump(cursor);
    else if (event.key === "Escape") cursor = null;
    else if (moves[event.key]) {
      if (!cursor) cursor = highest();
      else {
        const line = lines.findIndex((each) => each.includes(cursor.place)), [down, right] = moves[event.key];
        const to = Math.max(0, Math.min(lines.length - 1, line + down));
        const column = Math.max(0, Math.min(measure.steps.length - 1, cursor.column + right));
        cursor = { place: to === line && !right ? cursor.place : peak(to, column)[0], column };
      }
    } else return;
    event.preventDefault();
    tell();
    draw();
  });

  const buttons = document.getElementById("heat-measures");
  for (const each of data.measures) {
    const button = element("button", { type: "button", textContent: each.name });
    button.addEventListener("click", () => { measure = each; show(); });
    buttons.append(button);
  }
  for (const name of ["rank", ...data.groupings.map((each) => each.name), "value"]) {
    order.append(element("option", { value: name, textContent: name === "value" ? "highest first" : `by ${name}` }));
  }
  order.addEventListener("change", show);
  onState((state) => {
    const place = data.ranks.indexOf(Number(state.rank)), column = measure.steps.indexOf(Number(state.step));
    pinned = state.rank !== undefined && place >= 0 && column >= 0 ? { place, column } : null;
    draw();
  });
  new ResizeObserver(draw).observe(canvas.parentElement);
  const recoloured = () => { small = null; draw(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recoloured);
  onPrint(recoloured);
  show();
  document.documentElement.dataset.heatmap = "drawn";
})();
