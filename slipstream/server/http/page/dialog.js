// Questions in a dialog of the page: a text, or yes and no.

import { at } from "./elements.js";

/** Ask for a text. Return it, or null if the user cancels. */
export function askText({ title, label, value = "", yes = "Save", secret = false }) {
  at("ask-text").type = secret ? "password" : "text";
  at("ask-text").value = value;
  at("ask-label").textContent = label;
  return open(title, yes, true).then(agreed => (agreed ? at("ask-text").value : null));
}

/** Ask for a decision. Return whether the user agrees. */
export const askYes = (title, yes) => open(title, yes, false);

function open(title, yes, withText) {
  at("ask-title").textContent = title;
  at("ask-yes").textContent = yes;
  at("ask-text").hidden = at("ask-label").hidden = !withText;
  const dialog = at("ask");
  dialog.returnValue = "no";
  if (!dialog.open) dialog.showModal();
  (withText ? at("ask-text") : at("ask-yes")).focus();
  return new Promise(done => {
    dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true });
  });
}
