"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 760px)");
  const GIB = 2 ** 30, MIB = 2 ** 20;
  // Okabe and Ito's palette, which people with any colour vision can tell apart.
  const BLUE = "#0072b2", ORANGE = "#e69f00", PINK = "#cc79a7", GREEN = "#009e73", RED = "#d55e00", SKY = "#56b4e9", GREY = "#8b949e";
  const PALETTE = [BLUE, ORANGE, GREEN, PINK, SKY, RED, "#b8a900", GREY];
  const PARTS = {
    weights: [BLUE, ["weights"]], optimizer: [ORANGE, ["optimizer"]], gradients: [PINK, ["gradients"]],
    activations: [GREEN, ["activations"]], logits: [RED, ["logits"]], "KV pool": [SKY, ["kv_pool"]],
    "buffers, graphs, residue": ["#b8a900", ["buffers", "graphs", "residue"]], "outside PyTorch": [GREY, ["outside"]],
  };
  const PHASES = {
    init: GREY, rollout_init: "#b8a900", rollout: SKY, log_prob: GREEN, forward: BLUE, backward: ORANGE,
    optimizer: PINK, weight_sync: RED, checkpoint: "#999999", comm: "#b8a900", data: "#999999",
  };
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  let printing = false, picked = report.memory.chosen;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const isSmall = (sizes) => Math.max(0, ...sizes) < 4 * GIB;
  const unitOf = (sizes) => (isSmall(sizes) ? [MIB, "MiB"] : [GIB, "GiB"]);
  const clip = (text, length) => (text.length <= length ? text : text.slice(0, length - 1) + "…");
  // Plotly reads some HTML in its texts; names of a job are no HTML.
  const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function layout(extra) {
    const text = css("--text"), line = css("--line"), ground = css("--ground");
    const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true };
    const result = {
      paper_bgcolor: ground, plot_bgcolor: ground, font: { color: text, size: 12, family: "system-ui, 'DejaVu Sans', sans-serif" },
      margin: { l: 56, r: 16, t: 40, b: 44 },
      legend: { entrywidth: narrow.matches ? 0.48 : undefined, entrywidthmode: narrow.matches ? "fraction" : "pixels", orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 }, traceorder: "normal" },
      hoverlabel: { namelength: -1, bgcolor: css("--card"), bordercolor: line, font: { color: text } }, ...extra,
    };
    for (const key of Object.keys(result)) if (/^[xy]axis/.test(key)) result[key] = { ...axis, ...result[key] };
    return result;
  }

  function draw(id, traces, extra) {
    const place = document.getElementById(id), whole = layout(extra);
    // On a telephone, names of phases or two axes leave a narrow plot: the legend begins left of it, else it is cut.
    if (narrow.matches && (id === "chart-parts" || whole.yaxis2)) whole.legend = { ...whole.legend, x: -0.28 };
    if (place) Plotly.react(place, traces, whole, { responsive: true, displaylogo: false, displayModeBar: id === "chart-timeline" && !narrow.matches && !printing, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "sendDataToCloud"] });
  }

  // Where a chart has more to label than a small screen is wide, it scrolls; a long one is higher.
  function size(id, { wide = 0, high = 0 }) {
    const place = document.getElementById(id);
    if (place && wide) place.style.minWidth = `${wide}px`;
    if (place && high) place.style.height = `${high}px`;
  }

  // What is wider than its place says that it scrolls.
  function marks() {
    for (const box of document.querySelectorAll(".scroll")) box.dataset.wide = String(box.scrollWidth > box.clientWidth + 1);
  }

  function say(id, text) {
    const place = document.getElementById(id);
    place.textContent = text;
    place.className = "note";
  }

  function peaks() {
    const memory = report.memory;
    const sizes = memory.attempts.flatMap((a) => [...Object.values(a.predicted), ...Object.values(a.measured)].map((p) => p.bytes).concat(Object.values(a.needed)));
    const rows = [];
    for (const phase of memory.phases) for (const attempt of memory.attempts) {
      const forecast = attempt.predicted[phase], reading = attempt.measured[phase], needed = attempt.needed[phase];
      const capacity = (reading && reading.capacity) || (forecast && forecast.capacity) || null;
      if (forecast || reading || needed) rows.push({ phase, attempt, forecast, reading, needed, capacity });
    }
    // Devices of different sizes are compared by how full they are.
    const [unit, name] = unitOf(sizes), shares = new Set(rows.map((r) => r.capacity)).size > 1 && rows.every((r) => r.capacity);
    const high = (row, bytes) => (bytes === undefined || bytes === null ? null : shares ? (100 * bytes) / row.capacity : bytes / unit);
    const told = (bytes) => (bytes === undefined || bytes === null ? "–" : isSmall([bytes]) ? `${(bytes / MIB).toFixed(1)} MiB` : `${(bytes / GIB).toFixed(2)} GiB`);
    const x = [rows.map((r) => r.phase), rows.map((r) => `#${r.attempt.number}`)];
    const text = rows.map((r) => `#${r.attempt.number} ${r.phase}: ${safe(clip(r.attempt.change, 80))}<br>` + [
      r.forecast ? `predicted ${told(r.forecast.bytes)}${r.forecast.error ? ` ± ${told(r.forecast.error)}` : ""}` : "", r.reading ? `measured ${r.reading.upper_bound ? "at most " : ""}${told(r.reading.bytes)}` : "",
      r.needed ? `needed ${told(r.needed)}` : "", r.capacity ? `capacity ${told(r.capacity)}` : ""].filter(Boolean).join("<br>"));
    const shown = { x, text, textposition: "none", hovertemplate: "%{text}<extra></extra>" };
    const traces = [
      { ...shown, type: "bar", name: "measured", y: rows.map((r) => high(r, r.reading && r.reading.bytes)), marker: { color: rows.map((r) => (r.reading && r.reading.upper_bound ? GREY : SKY)) } },
      { ...shown, type: "bar", name: "predicted", y: rows.map((r) => high(r, r.forecast && r.forecast.bytes)), marker: { color: "rgba(0,0,0,0)", line: { color: css("--text"), width: 1.5 } },
        error_y: { type: "data", array: rows.map((r) => high(r, r.forecast && r.forecast.error) || 0), thickness: 1, width: 3, color: css("--dim") } },
      { ...shown, textposition: undefined, type: "scatter", mode: "markers", name: "needed by the request that failed", y: rows.map((r) => high(r, r.needed)), marker: { symbol: "x", size: 9, color: RED } },
      { x, type: "scatter", mode: "lines", name: "capacity", y: rows.map((r) => high(r, r.capacity)), line: { color: RED, width: 2, dash: "dash", shape: "hvh" }, hoverinfo: "skip" },
    ].filter((trace) => trace.y.some((value) => value !== null));
    size("chart-peaks", { wide: Math.max(24 * rows.length, 84 * memory.phases.length) + 90 });
    draw("chart-peaks", traces, { barmode: "overlay", bargap: 0.25, xaxis: { type: "multicategory", tickangle: "auto", title: { text: "phase and attempt" } }, yaxis: { title: { text: shares ? "peak, % of the device" : `peak, ${name}` }, rangemode: "tozero" }, showlegend: !narrow.matches, margin: { l: 56, r: 16, t: narrow.matches ? 10 : 40, b: 60 } });
  }

  function parts() {
    const attempt = report.memory.attempts.find((a) => a.number === picked) || report.memory.attempts.at(-1);
    if (!attempt || !document.getElementById("chart-parts")) return;
    const phases = report.memory.phases.filter((phase) => attempt.predicted[phase]).reverse();
    const [unit, name] = unitOf(phases.map((phase) => attempt.predicted[phase].bytes));
    const traces = Object.entries(PARTS).map(([label, [color, keys]]) => ({
      type: "bar", orientation: "h", name: label, y: phases, marker: { color },
      x: phases.map((phase) => keys.reduce((sum, key) => sum + (attempt.predicted[phase].parts[key] || 0), 0) / unit),
      hovertemplate: `%{y}: ${label} %{x:.2f} ${name}<extra></extra>`,
    })).filter((trace) => trace.x.some((value) => value > 0));
    const marks = (label, symbol, color, of) => ({ type: "scatter", mode: "markers", name: label, y: phases, x: phases.map(of), marker: { symbol, size: 11, color, line: { width: 2, color } }, hovertemplate: `%{y}: ${label} %{x:.2f} ${name}<extra></extra>` });
    traces.push(marks("after calibration", "diamond-open", css("--text"), (phase) => attempt.predicted[phase].bytes / unit));
    traces.push(marks("measured", "circle", css("--text"), (phase) => (attempt.measured[phase] ? attempt.measured[phase].bytes / unit : null)));
    traces.push(marks("capacity", "line-ns-open", RED, (phase) => (attempt.predicted[phase].capacity ? attempt.predicted[phase].capacity / unit : null)));
    size("chart-parts", { high: 36 * phases.length + (narrow.matches ? 220 : 130) });
    draw("chart-parts", traces.filter((t) => t.x.some((value) => value !== null)), { barmode: "stack", bargap: 0.35, xaxis: { title: { text: `memory of attempt #${attempt.number}, ${name}` }, rangemode: "tozero" }, yaxis: { dtick: 1 }, margin: { l: 56, r: 16, t: narrow.matches ? 130 : 60, b: 44 } });
  }

  function pickers() {
    const place = document.getElementById("pick-attempt");
    if (!place) return;
    for (const attempt of report.memory.attempts) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = `#${attempt.number}`;
      button.title = attempt.change;
      button.setAttribute("aria-pressed", String(attempt.number === picked));
      button.addEventListener("click", () => {
        picked = attempt.number;
        for (const other of place.children) other.setAttribute("aria-pressed", String(other === button));
        parts();
      });
      place.append(button);
    }
  }

  function timeline() {
    const line = report.timeline;
    if (!line) return;
    const longest = Math.max(0, ...line.series.flatMap((s) => s.seconds));
    const [scale, time] = longest > 7200 ? [3600, "h"] : longest > 300 ? [60, "min"] : [1, "s"];
    const traces = [];
    // Processes that hold little of their host have an axis of their own; otherwise they lie on the zero line.
    const sizes = (host) => line.series.filter((s) => s.host === host).flatMap((s) => s.bytes.concat(s.capacity || []));
    const own = Math.max(0, ...sizes(false)), beside = own > 0 && own < Math.max(0, ...sizes(true)) / 4;
    const units = { false: unitOf(beside ? sizes(false) : sizes(false).concat(sizes(true))), true: unitOf(sizes(true)) };
    line.series.forEach((s, index) => {
      const color = PALETTE[index % PALETTE.length];
      const right = beside && s.host, axis = right ? { yaxis: "y2" } : {}, [unit, name] = units[right];
      traces.push({ ...axis, type: "scatter", mode: s.seconds.length < 3 ? "lines+markers" : "lines", name: safe(clip(s.name, narrow.matches ? 18 : 40)), x: s.seconds.map((v) => v / scale), y: s.bytes.map((v) => v / unit), line: { color, width: 1.8, dash: s.host ? "dot" : DASHES[Math.floor(index / PALETTE.length) % 4] }, hovertemplate: `%{y:.2f} ${name} at %{x:.1f} ${time}` });
      if (s.capacity) traces.push({ ...axis, type: "scatter", mode: "lines", name: `capacity of ${safe(s.name)}`, x: [Math.min(...s.seconds) / scale, longest / scale], y: [s.capacity / unit, s.capacity / unit], line: { color, width: 1, dash: "dash" }, showlegend: false, visible: true, hovertemplate: `capacity %{y:.2f} ${name}` });
    });
    const seen = [...new Set(line.phases.map((p) => p.phase))];
    for (const phase of seen) traces.push({ type: "scatter", mode: "markers", name: phase, x: [null], y: [null], marker: { symbol: "square", size: 12, color: PHASES[phase] || GREY, opacity: 0.45 }, hoverinfo: "skip" });
    const shapes = line.phases.map((p) => ({ type: "rect", layer: "below", xref: "x", yref: "paper", x0: p.begin / scale, x1: p.end / scale, y0: 0, y1: 1, line: { width: 0 }, fillcolor: PHASES[p.phase] || GREY, opacity: 0.22 }));
    size("chart-timeline", { high: narrow.matches ? 560 : 480 });
    const place = document.getElementById("chart-timeline");
    const rows = Math.ceil((line.series.length + seen.length) / (narrow.matches ? 2 : Math.max(2, Math.floor((place ? place.clientWidth : 0) / 260))));
    const host = beside ? { yaxis2: { title: { text: `host, ${units.true[1]}` }, rangemode: "tozero", tickmode: "auto", overlaying: "y", side: "right", showgrid: false } } : {};
    draw("chart-timeline", traces, { shapes, xaxis: { title: { text: `since the attempt began, ${time}` } }, yaxis: { title: { text: `${beside ? "processes" : "in use"}, ${units.false[1]}` }, rangemode: "tozero" }, ...host, margin: { l: 56, r: beside ? 56 : 16, t: (narrow.matches ? 30 : 50) + 20 * rows, b: 44 } });
  }

  function model() {
    const rows = report.memory.comparisons;
    if (!rows.length) return;
    const [unit, name] = unitOf(rows.flatMap((r) => [r.predicted, r.measured]));
    const attempts = [...new Set(rows.map((r) => r.attempt))];
    const symbols = ["circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "triangle-down"];
    const traces = attempts.map((number, index) => {
      const own = rows.filter((r) => r.attempt === number);
      return { type: "scatter", mode: "markers", name: `#${number}`, x: own.map((r) => r.measured / unit), y: own.map((r) => r.predicted / unit), text: own.map((r) => r.phase), marker: { size: 9, symbol: symbols[index % symbols.length], color: PALETTE[index % PALETTE.length] }, error_y: { type: "data", array: own.map((r) => r.error / unit), thickness: 1, width: 3 }, hovertemplate: `#${number} %{text}<br>measured %{x:.2f} ${name}<br>predicted %{y:.2f} ± %{error_y.array:.2f} ${name}<extra></extra>` };
    });
    const most = 1.08 * Math.max(...rows.map((r) => Math.max(r.predicted + r.error, r.measured))) / unit;
    traces.push({ type: "scatter", mode: "lines", name: "equal", x: [0, most], y: [0, most], line: { color: GREY, dash: "dash", width: 1 }, hoverinfo: "skip" });
    draw("chart-model", traces, { xaxis: { title: { text: `measured, ${name}` }, range: [0, most] }, yaxis: { title: { text: `predicted, ${name}` }, range: [0, most] } });
  }

  const label = (trial) => `trial ${trial.trial}: ${trial.result}<br>${safe(clip(trial.change, 90))}`;

  function history(search) {
    // A trial may be measured again: each result has a place of its own.
    const results = search.trials.map((trial, index) => ({ ...trial, place: index + 1 }));
    const measured = results.filter((t) => t.rate !== null && t.fits);
    const others = results.filter((t) => !(t.rate !== null && t.fits));
    let best = 0;
    const front = measured.map((t) => (best = Math.max(best, t.rate)));
    draw("chart-history", [
      { type: "scatter", mode: "markers", name: "fits", x: measured.map((t) => t.place), y: measured.map((t) => t.rate), text: measured.map(label), error_y: { type: "data", array: measured.map((t) => (t.noise || 0) * t.rate), thickness: 1, width: 3 }, marker: { color: BLUE, size: 8 }, hovertemplate: `%{text}<br>%{y:,.4~g} ${search.unit}<extra></extra>` },
      { type: "scatter", mode: "lines", name: "best so far", x: measured.map((t) => t.place), y: front, line: { color: RED, shape: "hv", width: 2 }, hoverinfo: "skip" },
      { type: "scatter", mode: "markers", name: "does not fit, or was not finished", x: others.map((t) => t.place), y: others.map((t) => t.rate || 0), text: others.map((t) => `${label(t)}<br>${safe(clip(t.reason, 90))}`), marker: { color: GREY, symbol: "x", size: 8 }, hovertemplate: "%{text}<extra></extra>" },
    ].filter((t) => t.x.length), { xaxis: { title: { text: "results in the order of time" } }, yaxis: { title: { text: `speed, ${search.unit}` }, rangemode: "tozero" } });
  }

  function importance(search) {
    const rows = Object.entries(search.importance).sort((a, b) => a[1] - b[1]);
    if (!rows.length) return say("chart-importance", "Too few trials were measured to tell.");
    size("chart-importance", { high: 34 * rows.length + 110 });
    draw("chart-importance", [{ type: "bar", orientation: "h", y: rows.map((r) => r[0]), x: rows.map((r) => 100 * r[1]), marker: { color: BLUE }, text: rows.map((r) => `${(100 * r[1]).toFixed(0)} %`), textposition: "auto", hovertemplate: "%{y}: %{x:.0f} %<extra></extra>" }], { xaxis: { title: { text: "share of the variation, %" }, range: [0, 105] }, yaxis: { dtick: 1 } });
  }

  // Lines over axes of their own: plotly's own parallel coordinates need WebGL, which prints badly.
  function parallel(search) {
    const rated = search.trials.filter((t) => t.rate !== null && t.fits).map((t) => t.rate);
    const axes = search.varied.map((knob) => {
      const values = [...new Set(search.trials.map((t) => t.knobs[knob]))];
      const numeric = values.every((v) => typeof v === "number");
      values.sort((a, b) => (numeric ? a - b : String(a) < String(b) ? -1 : 1));
      const at = (v) => (values.length < 2 ? 0.5 : values.indexOf(v) / (values.length - 1));
      const every = Math.ceil(values.length / 6);
      return { name: knob, at: (t) => at(t.knobs[knob]), ticks: values.filter((_, i) => i % every === 0 || i === values.length - 1).map((v) => [at(v), v === null ? "default" : String(v)]) };
    });
    const most = Math.max(...rated, 0), least = Math.min(...rated, most);
    const share = (rate) => (most > least ? (rate - least) / (most - least) : 1);
    const round = (v) => (v >= 100 ? Math.round(v).toLocaleString("en") : v.toPrecision(3));
    axes.push({ name: `speed, ${search.unit}`, at: (t) => (t.rate !== null && t.fits ? share(t.rate) : -0.12), ticks: [[-0.12, "–"], ...(most > least ? [[0, round(least)]] : []), [1, round(most)]] });
    const traces = [...search.trials].sort((a, b) => (a.fits ? a.rate || 0 : -1) - (b.fits ? b.rate || 0 : -1)).map((t) => {
      const fits = t.fits && t.rate !== null;
      return { type: "scatter", mode: "lines+markers", showlegend: false, x: axes.map((_, i) => i), y: axes.map((a) => a.at(t)), marker: { size: 5 }, opacity: fits ? 0.9 : 0.6, line: { width: t.best ? 4 : fits ? 2 : 1, dash: fits ? "solid" : "dot", color: fits ? mix(share(t.rate)) : GREY }, text: axes.map(() => label(t) + (fits ? `<br>${round(t.rate)} ${search.unit}` : "")), hovertemplate: "%{text}<extra></extra>" };
    });
    const annotations = axes.flatMap((axis, i) => axis.ticks.map(([y, text]) => ({ x: i, y, text: safe(clip(text, 14)), showarrow: false, xanchor: i === axes.length - 1 ? "right" : "left", xshift: i === axes.length - 1 ? -7 : 7, font: { size: 11, color: css("--text") }, bgcolor: css("--ground"), opacity: 0.85 })));
    const shapes = axes.map((_, i) => ({ type: "line", x0: i, x1: i, y0: -0.12, y1: 1, line: { color: css("--dim"), width: 1 }, layer: "below" }));
    size("chart-parallel", { wide: 150 * axes.length });
    draw("chart-parallel", traces, { annotations, shapes, hovermode: "closest", xaxis: { tickvals: axes.map((_, i) => i), ticktext: axes.map((a) => safe(a.name)), range: [-0.4, axes.length - 0.6], showgrid: false, showline: false, zeroline: false, tickangle: 0 }, yaxis: { visible: false, range: [-0.2, 1.08] }, margin: { l: 16, r: 24, t: 8, b: 44 } });
  }

  // From orange, slow, to blue, fast.
  function mix(share) {
    const from = [230, 159, 0], to = [0, 114, 178];
    return `rgb(${from.map((v, i) => Math.round(v + (to[i] - v) * share)).join(",")})`;
  }

  function pareto(search) {
    const rows = search.trials.filter((t) => t.rate !== null && t.headroom !== null && t.fits);
    if (!rows.length) return say("chart-pareto", "No trial reported how much memory stayed free.");
    const front = rows.filter((t) => t.front).sort((a, b) => a.headroom - b.headroom);
    const point = (name, own, marker) => ({ type: "scatter", mode: "markers", name, x: own.map((t) => 100 * t.headroom), y: own.map((t) => t.rate), text: own.map(label), marker: { size: 9, ...marker }, hovertemplate: `%{text}<br>%{y:,.4~g} ${search.unit}, %{x:.1f} % free<extra></extra>` });
    draw("chart-pareto", [
      { type: "scatter", mode: "lines", name: "Pareto front", x: front.map((t) => 100 * t.headroom), y: front.map((t) => t.rate), line: { color: RED, width: 2 }, hoverinfo: "skip" },
      point("trial", rows.filter((t) => !t.best), { color: BLUE }),
      point("best", rows.filter((t) => t.best), { color: ORANGE, symbol: "star", size: 15 }),
    ].filter((t) => t.x.length), { shapes: [{ type: "line", xref: "x", yref: "paper", x0: 100 * search.goal_headroom, x1: 100 * search.goal_headroom, y0: 0, y1: 1, line: { color: GREY, dash: "dash", width: 1 } }], annotations: [{ x: 100 * search.goal_headroom, y: 1, yref: "paper", text: "goal", showarrow: false, xanchor: "left", xshift: 4, yanchor: "top" }], xaxis: { title: { text: "least free memory, %" }, rangemode: "tozero" }, yaxis: { title: { text: `speed, ${search.unit}` }, rangemode: "tozero" } });
  }

  function losses() {
    const curves = report.training.losses;
    draw("chart-losses", curves.map((c, i) => ({ type: "scatter", mode: c.steps.length < 40 ? "lines+markers" : "lines", name: c.trial === null ? `#${c.attempt}` : `#${c.attempt}, trial ${c.trial}`, x: c.steps, y: c.values, line: { color: PALETTE[i % PALETTE.length], dash: DASHES[Math.floor(i / PALETTE.length) % 4], width: 1.8 }, hovertemplate: "step %{x}: %{y:.5g}" })), { xaxis: { title: { text: "step" }, rangemode: "tozero" }, yaxis: { title: { text: curves.length ? safe(curves[0].metric) : "loss" }, exponentformat: "e" }, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, showlegend: true, margin: { l: 56, r: 16, t: 40, b: 44 } });
  }

  function spent() {
    const rows = report.conclusion.spent, gpus = report.conclusion.gpus;
    const most = Math.max(0, ...rows.map((r) => r.seconds));
    const [scale, time] = gpus ? [1, "GPU-hours"] : most > 7200 ? [3600, "h"] : most > 300 ? [60, "min"] : [1, "s"];
    draw("chart-spent", rows.map((r, i) => ({ type: "bar", orientation: "h", name: r.what, y: [""], x: [gpus ? r.gpu_hours : r.seconds / scale], marker: { color: PALETTE[i % PALETTE.length] }, hovertemplate: `${safe(r.what)}: %{x:.3g} ${time}<extra></extra>` })), { barmode: "stack", xaxis: { title: { text: time } }, yaxis: { visible: false }, margin: { l: 16, r: 16, t: 60, b: 44 }, showlegend: true });
  }

  function all() {
    peaks(); parts(); timeline(); model(); losses(); spent();
    const search = report.search;
    if (search) { history(search); importance(search); parallel(search); pareto(search); }
    marks();
  }

  function sortable() {
    const table = document.getElementById("trials");
    if (!table) return;
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.tabIndex = 0;
      const sort = () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
        const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
        [...body.rows].sort((a, b) => (up ? 1 : -1) * compare(key(a), key(b))).forEach((row) => body.append(row));
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } });
    });
  }

  function copies() {
    for (const button of document.querySelectorAll("button.copy")) {
      button.hidden = false;
      button.addEventListener("click", () => {
        const text = button.parentNode.querySelector("code");
        const range = document.createRange();
        range.selectNodeContents(text);
        const selection = getSelection();
        selection.removeAllRanges();
        selection.addRange(range);
        const done = () => { button.textContent = "Copied"; };
        if (navigator.clipboard) navigator.clipboard.writeText(text.textContent).then(done, () => document.execCommand("copy") && done());
        else if (document.execCommand("copy")) done();
      });
    }
  }

  const print = (is) => () => { printing = is; all(); };
  pickers(); sortable(); copies(); all();
  dark.addEventListener("change", all);
  narrow.addEventListener("change", all);
  addEventListener("resize", marks);
  addEventListener("toggle", marks, true);
  addEventListener("beforeprint", print(true));
  addEventListener("afterprint", print(false));
  addEventListener("hashchange", () => { const target = document.getElementById(location.hash.slice(1)); if (target && target.tagName === "DETAILS") target.open = true; });
  document.documentElement.dataset.drawn = "true";
})();
