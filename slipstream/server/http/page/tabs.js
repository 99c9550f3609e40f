// The tabs, and the two panels at the sides.

import { at } from "./elements.js";

const NAMES = ["chat", "compare", "schema", "dashboard"];
const NARROW = matchMedia("(max-width: 60rem)");

/** Show the tab of the address (`#dashboard`), and let the user choose another. */
export function startTabs(onShow) {
  const tabs = NAMES.map(name => at(`tab-${name}`));

  function show(name) {
    for (const one of NAMES) {
      const chosen = one === name;
      at(one).hidden = !chosen;
      at(`tab-${one}`).setAttribute("aria-selected", String(chosen));
      at(`tab-${one}`).tabIndex = chosen ? 0 : -1;
    }
    document.body.dataset.view = name;  // the panels belong to the other views: style.css
    onShow(name);
  }

  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => { history.replaceState(null, "", `#${NAMES[index]}`); show(NAMES[index]); });
    tab.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(index + step + tabs.length) % tabs.length];
      next.focus();
      next.click();
    });
  });
  const wanted = () => (NAMES.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat");
  addEventListener("hashchange", () => show(wanted()));
  show(wanted());
}

/** Let the buttons show and hide the panels. On a narrow page they lie above it, and start hidden. */
export function startPanels(store) {
  for (const name of ["list", "settings"]) {
    const button = at(`show-${name}`), panel = at(name);
    const show = shown => {
      panel.hidden = !shown;
      button.setAttribute("aria-expanded", String(shown));
    };
    show(!NARROW.matches && store.get(`panel.${name}`, true));
    button.addEventListener("click", () => {
      show(panel.hidden);
      if (NARROW.matches && !panel.hidden) panel.querySelector("button, input, select").focus();
      if (!NARROW.matches) store.set(`panel.${name}`, !panel.hidden);
    });
    NARROW.addEventListener("change", () => show(!NARROW.matches));
    document.addEventListener("click", event => {
      const outside = !panel.contains(event.target) && !button.contains(event.target) && event.target.isConnected;
      if (NARROW.matches && outside && !at("ask").contains(event.target)) show(false);
    });
    panel.addEventListener("keydown", event => {
      if (event.key === "Escape" && NARROW.matches) {
        show(false);
        button.focus();
      }
    });
  }
}

/** Hide the list after a choice, where it lies above the page. */
export function hideListIfNarrow() {
  if (!NARROW.matches) return;
  at("list").hidden = true;
  at("show-list").setAttribute("aria-expanded", "false");
}
