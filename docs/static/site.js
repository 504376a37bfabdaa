// Copy buttons on code, and tabs from the sections of operating systems (install.md).
"use strict";

const TABS = ["linux", "macos", "windows", "raspberry-pi"]; // ids of sections

/** @param {HTMLElement} block */
function addCopyButton(block) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(block.querySelector("pre").innerText);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  block.append(button);
}

/** @param {HTMLElement} section */
const titleOf = (section) => section.querySelector("h2").firstChild.textContent;

/** @param {HTMLElement[]} sections neighbours, each with its heading first */
function addTabs(sections) {
  const list = document.createElement("div");
  list.className = "tabs";
  list.setAttribute("role", "tablist");
  const show = (chosen) => {
    for (const [at, section] of sections.entries()) {
      section.hidden = section !== chosen;
      list.children[at].setAttribute("aria-selected", String(section === chosen));
    }
  };
  for (const section of sections) {
    const tab = document.createElement("button");
    tab.type = "button";
    tab.setAttribute("role", "tab");
    tab.textContent = titleOf(section);
    tab.addEventListener("click", () => show(section));
    list.append(tab);
    section.setAttribute("role", "tabpanel");
  }
  sections[0].before(list);
  const system = navigator.userAgent.match(/Windows|Mac|Linux/)?.[0].replace("Mac", "macOS");
  const linked = sections.find((section) => location.hash === `#${section.id}`);
  show(linked ?? sections.find((section) => titleOf(section) === system) ?? sections[0]);
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("div.highlight").forEach(addCopyButton);
  const sections = TABS.map((id) => document.getElementById(id));
  if (sections.every((section) => section?.tagName === "SECTION")) addTabs(sections);
});
