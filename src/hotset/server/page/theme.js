// Applies the user's stored theme before the first paint. A separate script, because the content security policy
// forbids scripts inside the HTML.
try {
  const chosen = localStorage.getItem("hotset.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is not available: use the system's theme.
}
