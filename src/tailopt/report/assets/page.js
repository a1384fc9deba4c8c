// The page: reads the data, keeps the state, and draws the sections again when the state changes.

(function page() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const state = { selected: new Set(data.runs.map((_, i) => i)), yLog: "automatic", xLog: false, spread: true, one: {} };
  const main = document.getElementById("main");
  const counts = [[data.runs.length, "run"], [data.sweeps.length, "sweep"], [data.studies.length, data.studies.length === 1 ? "study" : "studie"]].filter(([n]) => n);
  document.getElementById("subtitle").textContent = `${counts.map(([n, word]) => `${n} ${word}${n === 1 ? "" : "s"}`).join(", ")} · ${data.made}`;
  document.getElementById("footer").textContent = "Lines of many rounds show the mean of every stretch, and a band from its lowest to its highest value. Arrow keys move through a chart that has the focus, Escape leaves it.";

  const sections = [runTable, groupTable, curveSection, settingsSection, clippingSection, nodeSection, timeSection];
  const holders = sections.map(() => el("div"));
  function update() {
    const focus = document.activeElement && document.activeElement.closest("[data-key]");
    const key = focus && focus.getAttribute("data-key");
    sections.forEach((build, k) => {
      const built = build(data, state, update);
      holders[k].replaceChildren(...(built ? [built] : []));
    });
    mark();
    const again = key && main.querySelector(`[data-key="${key}"]`);
    if (again) again.focus({ preventScroll: true });
  }
  // a control that is drawn again keeps the focus: keyboards would lose their place
  function mark() {
    main.querySelectorAll("input, select, button").forEach((node, k) => node.setAttribute("data-key", k));
  }
  main.append(...data.notices.map((text) => el("p", { class: "notice" }, text)), ...holders, ...studySections(data).filter(Boolean), ...sweepSections(data).filter(Boolean));
  update();
  document.documentElement.setAttribute("data-drawn", "true");
})();
