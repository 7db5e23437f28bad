// The colours that were chosen, before the first paint; without a choice, those of the system.
const chosen = localStorage.getItem("llmc.theme");
if (chosen) document.documentElement.dataset.theme = chosen;
