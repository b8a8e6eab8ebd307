// The table of all configurations, its filters, and the figures that follow them. Texts are set as text, never as HTML.
const PAGE = 100;
const find = (id) => document.getElementById(id);
const make = (tag, inside, properties = {}) => inside.appendChild(Object.assign(document.createElement(tag), properties));
const state = {sort: TABLE.sort, down: true, shown: PAGE, filters: TABLE.columns.map(() => null), front: false, steady: false};
const front = new Set(TABLE.front);
const show = (value, at) => value === null ? "–" : typeof value !== "number" ? value
  : value.toLocaleString("en-US", TABLE.columns[at].kind === "axis" ? {maximumSignificantDigits: 12}
    : Math.abs(value) >= 100 ? {maximumFractionDigits: 0} : {maximumSignificantDigits: 3});


// Of a figure under the model's error; nothing where its digits show none.
const range = (i, at) => {
  const said = (TABLE.ranges[i]?.[at - TABLE.axes] ?? []).map((end) => show(end, at));
  return said.every((end) => end === show(TABLE.rows[i][at], at)) ? "" : said.join("–");
};

// "100", ">100", "<=0.5", "10..20" as a test of numbers; null where it is none of them.
function test(text) {
  const number = "([-+]?[\\d.]+(?:e[-+]?\\d+)?)";
  let found = text.match(new RegExp(`^(<=|>=|<|>|=)?\\s*${number}$`, "i"));
  if (found) {
    const to = Number(found[2]);
    if (Number.isNaN(to)) return null;
    return {"<": (x) => x < to, "<=": (x) => x <= to, ">": (x) => x > to, ">=": (x) => x >= to}[found[1]]
      ?? ((x) => x === to);
  }
  found = text.match(new RegExp(`^${number}\\s*\\.\\.\\s*${number}$`, "i"));
  return found ? (x) => x >= Number(found[1]) && x <= Number(found[2]) : null;
}

function filters() {
  const box = find("filters");
  TABLE.columns.forEach((column, at) => {
    const values = [...new Set(TABLE.rows.map((row) => row[at]))];
    const label = make("label", box, {title: column.title});
    make("span", label, {textContent: column.name});
    if (column.kind === "axis" && values.length <= 30) {
      const numbers = values.every((value) => typeof value === "number");
      const select = make("select", label, {id: `filter${at}`});
      make("option", select, {textContent: "all", value: ""});
      (numbers ? values.sort((a, b) => a - b) : values).forEach((value, i) =>
        make("option", select, {textContent: show(value, at), value: String(i)}));
      select.onchange = () => {
        const value = values[Number(select.value)];
        state.filters[at] = select.value === "" ? null : (x) => x === value;
        update();
      };
    } else {
      const input = make("input", label, {type: "text", id: `filter${at}`, placeholder: "all"});
      input.oninput = () => {
        const text = input.value.trim(), wanted = test(text);
        const word = TABLE.rows.some((row) => typeof row[at] === "string");
        input.classList.toggle("wrong", text !== "" && !wanted && !word);
        state.filters[at] = text === "" ? null : word ? (x) => String(x).toLowerCase().includes(text.toLowerCase())
          : wanted ? (x) => x !== null && wanted(x) : null;
        update();
      };
    }
  });
  [["front", "on a front only"], ["steady", "only those that keep up"]].forEach(([name, said]) => {
    const label = make("label", box, {className: "check"});
    const input = make("input", label, {type: "checkbox", id: name});
    make("span", label, {textContent: said});
    input.onchange = () => { state[name] = input.checked; update(); };
  });
}

const passes = (row, i) => state.filters.every((wanted, at) => !wanted || wanted(row[at]))
  && !(state.front && !front.has(TABLE.points[i])) && !(state.steady && !TABLE.steady[i]);

// Numbers before words, what is missing last.
function compare(a, b) {
  const x = TABLE.rows[a][state.sort], y = TABLE.rows[b][state.sort];
  if (x === null || y === null) return (x === null) - (y === null);
  const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
  return state.down ? -order : order;
}

function update() {
  state.shown = PAGE;
  const kept = TABLE.rows.flatMap((row, i) => passes(row, i) ? [i] : []);
  const all = kept.length === TABLE.rows.length;
  dim(all ? null : new Set(kept.map((i) => TABLE.points[i])));
  table(kept);
}

function table(kept) {
  const place = find("table");
  place.replaceChildren();
  const top = make("tr", make("thead", place));
  TABLE.columns.forEach((column, at) => {
    const head = make("th", top, {title: column.title, className: column.kind === "axis" ? "" : "number"});
    if (at === state.sort) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    const mark = at === state.sort ? (state.down ? " ↓" : " ↑") : "";
    make("button", head, {textContent: column.name + mark}).onclick = () => {
      state.down = at === state.sort ? !state.down : column.kind !== "axis";
      state.sort = at;
      table(kept);
    };
  });
  const body = make("tbody", place);
  [...kept].sort(compare).slice(0, state.shown).forEach((i) => {
    const on = front.has(TABLE.points[i]);
    const row = make("tr", body, {className: (on ? "front" : "") + (TABLE.steady[i] ? "" : " unsteady")});
    row.title = [on ? "on a front" : "", TABLE.states[i]].filter(Boolean).join(", ");
    TABLE.rows[i].forEach((value, at) => {
      const cell = make("td", row, {
        textContent: show(value, at), className: TABLE.columns[at].kind === "axis" ? "" : "number"});
      if (range(i, at)) make("small", cell, {textContent: range(i, at)});
    });
  });
  find("count").textContent = `${kept.length.toLocaleString("en-US")} of ${TABLE.rows.length.toLocaleString("en-US")}; `
    + "a blue edge: on a front; grey: does not keep up with its load, or ran too short to tell";
  const more = find("more");
  more.hidden = kept.length <= state.shown;
  more.textContent = `Show ${Math.min(PAGE, kept.length - state.shown)} more`;
  more.onclick = () => { state.shown += PAGE; table(kept); };
}

// What a marker says: values first, then the first figures. Plotly reads tags.
const plain = (text) => String(text).replace(/[&<>]/g, (c) => ({"&": "&amp;", "<": "&lt;", ">": "&gt;"})[c]);
const row = new Map(TABLE.points.map((point, i) => [point, i]));
function hover(point) {
  const i = row.get(point);
  const shown = TABLE.columns.flatMap((column, at) => column.kind === "axis" || at < TABLE.hover || TABLE.columns[at].kind === "front" ? [at] : []);
  return [...shown.map((at) => `${plain(TABLE.columns[at].name)} <b>${plain(show(TABLE.rows[i][at], at))}</b>`
      + (range(i, at) ? ` (${range(i, at)})` : "")),
    ...(TABLE.states[i] ? [TABLE.states[i]] : [])].join("<br>");
}
Object.values(FIGURES).forEach((figure) => figure.data.forEach((trace) => {
  if (trace.meta?.points) trace.text = trace.meta.points.map(hover);
}));

// Markers and lines of other points fade; null: none do.
const whole = Object.fromEntries(Object.entries(FIGURES).map(([id, f]) => [id, f.data.map(({x, y}) => ({x, y}))]));
function dim(points) {
  Object.entries(FIGURES).forEach(([id, figure]) => figure.data.forEach((trace, k) => {
    if (trace.meta?.points)
      trace.selectedpoints = points && trace.meta.points.flatMap((point, i) => points.has(point) ? [i] : []);
    if (trace.meta?.lines) {
      const {x, y} = whole[id][k], length = x.length / Math.max(trace.meta.lines.length, 1);
      const wanted = (_, i) => !points || points.has(trace.meta.lines[Math.floor(i / length)]);
      [trace.x, trace.y] = [x.filter(wanted), y.filter(wanted)];
    }
  }));
  draw();
}

const pair = find("pair");
if (pair) pair.onchange = () => { FIGURES.heat = HEAT[Number(pair.value)]; draw(); };
filters();
update();
