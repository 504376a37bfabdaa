// Before the first paint: the reader's own choice of light or dark, where there is one. (A script of its own,
// since the page's policy allows none inside the HTML.)
try {
  const chosen = localStorage.getItem("hotset.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is closed to this page: the system's choice it is.
}
