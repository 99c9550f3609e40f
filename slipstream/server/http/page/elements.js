// The elements of index.html.

export const at = id => document.getElementById(id);

export function showProblem(text) {
  at("problem").textContent = text;
}
