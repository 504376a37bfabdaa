// Opens and closes drawers and dialogs, and sets the theme.

import { scheme, onSchemeChange } from "./colours.js";
import { byId } from "./dom.js";

const WIDE = window.matchMedia("(min-width: 90rem)"); // conversations are next to the chat, as in the style sheet
const PANEL = "hotset.panel";

const isHistoryOpen = () =>
  document.body.classList.contains(WIDE.matches ? "history-closed" : "history-open") !== WIDE.matches;

/** Open or close the list of conversations: a drawer or, on a wide screen, a column whose state is stored. */
export function openHistory(is) {
  document.body.classList.toggle("history-open", is && !WIDE.matches);
  if (WIDE.matches) {
    document.body.classList.toggle("history-closed", !is);
    keep(PANEL, is ? null : "closed");
  }
  nameHistory();
  if (is) byId("hide-history").focus();
}

/** Close the list if it covers the chat. */
export function leaveHistory() {
  if (!WIDE.matches) openHistory(false);
}

export function openPicture(is) {
  const sheet = getComputedStyle(byId("show-picture")).display !== "none";
  document.body.classList.toggle("picture-open", is && sheet);
  byId("show-picture").setAttribute("aria-expanded", String(is && sheet));
  if (is && sheet) byId("hide-picture").focus();
}

/** Close the part that Escape closes; false: nothing is open. */
export function closeTop() {
  if (document.body.classList.contains("picture-open")) byId("hide-picture").click();
  else if (document.body.classList.contains("history-open")) byId("hide-history").click();
  else return false;
  return true;
}

const nameHistory = () => byId("show-history").setAttribute("aria-expanded", String(isHistoryOpen()));

function nameTheme() {
  byId("theme").setAttribute("aria-checked", String(scheme() === "dark"));
}

/** Store a value; null removes it. */
function keep(name, value) {
  try {
    if (value === null) localStorage.removeItem(name);
    else localStorage.setItem(name, value);
  } catch {
    // It holds until the page is closed.
  }
}

byId("show-history").addEventListener("click", () => openHistory(!isHistoryOpen()));
byId("hide-history").addEventListener("click", () => {
  openHistory(false);
  byId("show-history").focus();
});
byId("show-picture").addEventListener("click", () => openPicture(!document.body.classList.contains("picture-open")));
byId("hide-picture").addEventListener("click", () => {
  openPicture(false);
  byId("show-picture").focus();
});
for (const dialog of document.querySelectorAll("dialog")) {
  // A click outside a dialog closes it.
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
}
byId("theme").addEventListener("click", () => {
  const next = scheme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  keep("hotset.theme", next);
});
onSchemeChange(nameTheme);
nameTheme();
try {
  document.body.classList.toggle("history-closed", localStorage.getItem(PANEL) === "closed");
} catch {
  // Storage is not available: the list is open.
}
WIDE.addEventListener("change", nameHistory);
nameHistory();
