// The timeline's data as it is drawn: absolute times, the rows of each lane, and what is told of a
// bar. A bar is `{ lane, call, span }`, of which `call` or `span` is -1.
clusterprof.timeline = (() => {
  const { bytes } = clusterprof;
  const data = clusterprof.data("timeline-data");
  if (!data) return null;
  const CALL_ROW = 14;
  const HEIGHTS = { phase: 15, host: 13, second_host: 13, device: 15 };
  const LABELS = { phase: "phases", host: "host", second_host: "host 2", device: "device" };
  const WHAT = {
    compute: "compute", wait: "waits in a collective for the last member", transfer: "collective transfers",
    copy: "copies", idle: "idle", range: "phase of the program", cuda: "CUDA call",
    cuda_wait: "CUDA call that may wait for the device", blocked: "call of the system that blocks",
    thread_wait: "waits for another thread", python: "Python", op: "operator",
  };

  // Absolute times, and for each collective the range of its calls.
  const last = [], first = [0], of = [];
  data.last.reduce((sum, more, index) => (last[index] = sum + more), 0);
  data.members.forEach((count, index) => {
    first.push(first[index] + count);
    for (let k = 0; k < count; k++) of.push(index);
  });
  const begin = data.wait.map((wait, call) => last[of[call]] - wait);
  const end = data.length.map((length, call) => begin[call] + length);

  // The spans: one range of the arrays for each lane and row.
  const S = data.spans, spanBegin = new Float64Array(S.gap.length), spanEnd = new Float64Array(S.gap.length);
  const many = new Map();
  const rangesOf = new Map();
  S.key.reduce((from, key, index) => {
    let at = 0;
    const to = from + S.size[index];
    for (let k = from; k < to; k++) {
      spanBegin[k] = at + S.gap[k];
      at = spanEnd[k] = spanBegin[k] + S.length[k];
    }
    rangesOf.set(key, [from, to]);
    return to;
  }, 0);
  S.merged.reduce((sum, more, index) => { many.set(sum + more, S.many[index]); return sum + more; }, 0);

  // The kind of each span, as a number: what is drawn often looks up no texts.
  const KINDS = Object.keys(WHAT), kindOf = Uint8Array.from(S.name, (name) => KINDS.indexOf(S.kinds[name]));
  const IDLE = KINDS.indexOf("idle");

  // The rows of each lane, top to bottom; calls of a row in the order of their begins.
  const rowsOf = data.lanes.map((lane, index) => {
    const rows = [];
    S.rows.forEach((name, row) => {
      const range = rangesOf.get(index * S.rows.length + row);
      if (range) rows.push({ name, range, height: HEIGHTS[name], label: LABELS[name] });
    });
    for (let row = 0; row < lane.rows; row++) rows.push({ name: "calls", calls: [], height: CALL_ROW, label: "calls" });
    let top = 0;
    for (const row of rows) { row.top = top; top += row.height + 1; }
    rows.height = top;
    return rows;
  });
  for (let call = 0; call < begin.length; call++) {
    const rows = rowsOf[data.lane[call]];
    const row = rows[rows.length - data.lanes[data.lane[call]].rows + data.row[call]];
    row.calls.push(call);
    if (row.calls.length === 1) row.label = data.groups[data.communicator[of[call]]] || "calls";
  }
  for (const rows of rowsOf) for (const row of rows) if (row.calls) row.calls.sort((one, other) => begin[one] - begin[other]);

  const whole = { lo: data.steps[0].begin, hi: data.steps[data.steps.length - 1].end };

  const stepName = (step) => (step.step === null ? "the whole window" : `step ${step.step}`);
  const wordOf = (step) => {
    if (data.worst < 0) return "";
    if (step === data.steps[data.worst]) return step.steady ? ", longest steady" : ", longest";
    return step === data.steps[data.typical] ? ", typical" : "";
  };
  const ms = (units, decimals) => clusterprof.ms(units * data.unit_ns, decimals);
  const stepAt = (moment) => data.steps.reduce((found, step) => (step.begin <= moment + 1 ? step : found), data.steps[0]);
  const laneName = (lane) => `rank ${data.lanes[lane].rank}`;
  const place = (moment) => {
    const step = stepAt(moment);
    return [step.step === null ? "begins" : `begins in step ${step.step}`, `at ${ms(moment - step.begin)}`];
  };

  // The first of [from, to) for which a test holds that holds for all behind it too.
  function lowest(from, to, holds) {
    while (from < to) {
      const middle = (from + to) >> 1;
      if (holds(middle)) to = middle; else from = middle + 1;
    }
    return from;
  }
  const firstSpan = (range, moment) => lowest(range[0], range[1], (k) => spanEnd[k] > moment);

  const timesOf = (it) => (it.call >= 0 ? [begin[it.call], end[it.call]] : [spanBegin[it.span], spanEnd[it.span]]);
  const rowOf = (it) => {
    const rows = rowsOf[it.lane];
    if (it.call >= 0) return rows[rows.length - data.lanes[it.lane].rows + data.row[it.call]];
    return rows.find((row) => row.range && it.span >= row.range[0] && it.span < row.range[1]);
  };

  // What the rows of a lane hold in a stretch of time: length by key, the longest first.
  function within(lane, name, from, to, keyOf) {
    const row = rowsOf[lane].find((each) => each.name === name), sums = new Map();
    if (!row) return [];
    for (let k = firstSpan(row.range, from); k < row.range[1] && spanBegin[k] < to; k++) {
      const key = keyOf(k);
      sums.set(key, (sums.get(key) || 0) + Math.min(spanEnd[k], to) - Math.max(spanBegin[k], from));
    }
    return [...sums].sort((one, other) => other[1] - one[1]);
  }

  function facts(it) {
    if (it.call >= 0) return factsOfCall(it.call);
    const k = it.span, kind = S.kinds[S.name[k]], lane = it.lane, row = rowOf(it);
    const from = spanBegin[k], to = spanEnd[k], name = S.names[S.name[k]];
    const title = `${kind === "idle" || !name ? WHAT[kind] : name} on ${laneName(lane)}`;
    const rows = [["length", ms(to - from)], place(from)];
    if (name && kind !== "idle") rows.unshift(["what", WHAT[kind]]);
    if (many.has(k)) rows.push(["merged", `${many.get(k)} that are shorter than ${ms(S.merged_below)} each, drawn one behind the other; the longest is named`]);
    const [phase] = row.name === "phase" ? [] : within(lane, "phase", from, to, (each) => S.names[S.name[each]]);
    if (phase) rows.push(["phase", phase[0]]);
    if (row.name === "device") {
      for (const [where, label] of [["host", "host meanwhile"], ["second_host", "host 2 meanwhile"]]) {
        const [most] = within(lane, where, from, to, (each) => S.names[S.name[each]]);
        if (most && most[1] > (to - from) / 4) rows.push([label, `${most[0]}, ${ms(most[1])} of it`]);
      }
    } else {
      const idle = within(lane, "device", from, to, (each) => S.kinds[S.name[each]]);
      if (idle.length) rows.push(["device meanwhile", idle.slice(0, 3).map(([what, length]) => `${what} ${ms(length, 2)}`).join(", ")]);
    }
    return [title, rows];
  }

  function factsOfCall(call) {
    const group = of[call], lane = data.lane[call];
    const name = data.operations[data.operation[group]] || "collective";
    const zero = stepAt(last[group]);
    const rows = [["bytes", bytes(data.bytes[group])]];
    const where = zero.step === null ? "" : ` in step ${zero.step}`;
    rows.push([`arrival${where}`, ms(begin[call] - zero.begin)]);
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
      const id = data.communicators[data.communicator[group]], kind = data.groups[data.communicator[group]];
      rows.push(["communicator", (data.order[group] < 0 ? id : `${id}, number ${data.order[group]}`) + (kind ? ` (${kind})` : "")]);
    }
    const state = data.states[data.state[group]];
    if (state) rows.push(["match", data.confidence[group] < 0 ? state : `${state}, ${data.confidence[group]}%`]);
    return [`${name} on ${laneName(lane)}`, rows];
  }

  // What is nearest to a moment in a row, no further off than `slack`; or null.
  function near(lane, row, moment, slack) {
    let best = null, distance = slack;
    const consider = (from, to, it) => {
      const off = Math.max(from - moment, moment - to, 0);
      if (off < distance || (off === 0 && !best)) { distance = off; best = it; }
    };
    if (row.calls) {
      for (const call of row.calls) {
        if (begin[call] > moment + slack) break;
        consider(begin[call], end[call], { lane, call, span: -1 });
      }
    } else {
      for (let k = firstSpan(row.range, moment - slack); k < row.range[1] && spanBegin[k] <= moment + slack; k++) {
        consider(spanBegin[k], spanEnd[k], { lane, call: -1, span: k });
      }
    }
    return best;
  }

  // All that the page carries as Chrome's trace events, which Perfetto's UI opens. Processes are
  // numbered from 1 on: Perfetto takes 0 for the idle process.
  clusterprof.trace = () => {
    const events = [], us = (units) => (units * data.unit_ns) / 1e3;
    data.lanes.forEach(({ rank, host }, lane) => {
      const pid = lane + 1, named = (name, tid, args) => events.push({ name, ph: "M", pid, tid, args });
      named("process_name", 0, { name: host ? `rank ${rank} · ${host}` : `rank ${rank}` });
      named("process_sort_index", 0, { sort_index: lane });
      rowsOf[lane].forEach((row, tid) => {
        named("thread_name", tid, { name: row.label });
        named("thread_sort_index", tid, { sort_index: tid });
        const add = (name, cat, from, to, args) =>
          events.push({ name, cat, ph: "X", pid, tid, ts: us(from - whole.lo), dur: us(to - from), args });
        for (const call of row.calls || []) {
          const group = of[call], args = { collective: group, state: data.states[data.state[group]] };
          if (!data.alone[group]) args.wait_us = us(data.wait[call]);
          add(data.operations[data.operation[group]] || "collective", "collective", begin[call], end[call], args);
        }
        for (let k = row.calls ? 0 : row.range[0]; !row.calls && k < row.range[1]; k++) {
          const kind = KINDS[kindOf[k]], args = many.has(k) ? { merged: many.get(k) } : {};
          add(S.names[S.name[k]] || WHAT[kind], kind, spanBegin[k], spanEnd[k], args);
        }
      });
    });
    const steps = data.steps.map((step) => ({ step: step.step, begin_us: us(step.begin - whole.lo), end_us: us(step.end - whole.lo) }));
    const about = { steps, note: "the steps of the report's timeline; clusterprof export has all" };
    return JSON.stringify({ displayTimeUnit: "ms", traceEvents: events, otherData: about });
  };

  // What tells most of a rank in a step: the call that blocks it longest, or its device's longest idle
  // time, of a fiftieth of the step at least; else the collective that waits for it longest.
  function telling(lane, zero, until) {
    const longest = {};
    for (const row of rowsOf[lane]) {
      if (!row.range) continue;
      for (let k = firstSpan(row.range, zero); k < row.range[1] && spanBegin[k] < until; k++) {
        // a range in the host's row is what the host is in while it makes no call
        const kind = row.name === "host" && S.kinds[S.name[k]] === "range" ? "blocked" : S.kinds[S.name[k]];
        const long = Math.min(spanEnd[k], until) - Math.max(spanBegin[k], zero);
        if ((kind === "blocked" || kind === "idle") && long > (longest[kind]?.long ?? (until - zero) / 50)) longest[kind] = { long, k };
      }
    }
    const { blocked, idle } = longest;
    if (blocked || idle) return { lane, call: -1, span: (blocked && blocked.long > (idle?.long ?? 0) / 2 ? blocked : idle).k };
    let best = -1;
    last.forEach((moment, group) => {
      if (data.late[group] === lane && moment >= zero && moment < until && (best < 0 || data.margin[group] > data.margin[best])) best = group;
    });
    for (let call = first[best]; call < first[best + 1]; call++) if (data.lane[call] === lane) return { lane, call, span: -1 };
    return null;
  }

  return {
    data, whole, last, first, of, begin, end, S, spanBegin, spanEnd, KINDS, kindOf, IDLE, WHAT, rowsOf,
    ms, stepName, wordOf, stepAt, laneName, firstSpan, timesOf, rowOf, facts, near, telling,
  };
})();
