// What the page's scripts share. Text reaches the page through textContent only: names in the
// data come from reports and are never markup.
"use strict";
document.documentElement.classList.add("js");

const clusterprof = (() => {
  // The JSON of a script element, or null where the page has none.
  const data = (id) => {
    const source = document.getElementById(id);
    return source && JSON.parse(source.textContent);
  };

  const ms = (ns, decimals = 3) => `${(ns / 1e6).toFixed(decimals)} ms`;
  const bytes = (count) => {
    if (count < 0) return "not known";
    if (count < 1000) return `${count} B`;
    const power = Math.min(Math.floor(Math.log10(count) / 3), 5);
    return `${(count / 1000 ** power).toPrecision(3)} ${"kMGTP"[power - 1]}B`;
  };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // An element of the page: properties, then children (texts become text nodes).
  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };

  // The state in the URL's hash, `#timeline&rank=2&step=8`: the part before the first & is the
  // anchor of a section. Every value is a text; a missing one is undefined.
  const parsed = () => {
    const [anchor, ...pairs] = location.hash.slice(1).split("&");
    const state = { anchor };
    for (const pair of pairs) {
      const [name, value = ""] = pair.split("=");
      try { state[name] = decodeURIComponent(value); } catch { /* a mangled link is no state */ }
    }
    return state;
  };
  const listeners = [];
  const written = ({ anchor = "", ...rest }) => {
    const pairs = Object.entries(rest).filter(([, value]) => value !== undefined && value !== null && value !== "");
    return ["#" + anchor, ...pairs.map(([name, value]) => `${name}=${encodeURIComponent(value)}`)].join("&");
  };
  // Shows a state: a link by itself (`href = hash(state)`), or by a script (`go(state)`).
  const hash = written;
  const go = (state) => {
    if (location.hash === written(state)) arrive();
    else location.hash = written(state);
  };
  // Remembers what is in view without an entry in the history and without moving the page.
  // A page without an origin (a sandboxed frame) has no history to write.
  const remember = (changes) => {
    try { history.replaceState(null, "", written({ ...parsed(), ...changes })); } catch { /* see above */ }
  };
  const onState = (act) => { listeners.push(act); };
  // What is linked stands open and is scrolled to; the browser itself does so for bare anchors only.
  const arrive = () => {
    const state = parsed();
    const target = state.anchor && document.getElementById(state.anchor);
    for (let each = target; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
    for (const act of listeners) act(state);
    if (target) target.scrollIntoView({ block: "start" });
  };
  addEventListener("hashchange", arrive);

  const copy = async (button, text, shown) => {
    const said = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(shown);
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = said; }, 1500);
  };
  for (const button of document.querySelectorAll("button.copy")) {
    const code = button.parentElement.querySelector("code");
    button.addEventListener("click", () => copy(button, code.textContent, code));
  }

  // On paper the evidence stands open; what was closed is closed again afterwards.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const each of opened) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of opened) each.open = false; });

  // Canvases are drawn for paper, in its colours and as fine as a printer's dots, and then again for
  // the screen.
  const root = document.documentElement, onPaper = () => root.classList.contains("on-paper");
  const density = () => (onPaper() ? 3 : devicePixelRatio || 1);
  const onPrint = (redraw) => {
    const turned = (paper) => () => { root.classList.toggle("on-paper", paper); redraw(); };
    addEventListener("beforeprint", turned(true));
    addEventListener("afterprint", turned(false));
  };

  return { onPaper, density, onPrint, data, ms, bytes, css, element, state: parsed, hash, go, remember, onState, arrive, copy };
})();
