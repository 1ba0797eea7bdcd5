// The what-if panel: which findings are repaired, and the replayed step that remains.
(() => {
  "use strict";
  const data = clusterprof.data("what-if-data"), panel = document.getElementById("what-if");
  if (!data || !panel) return;
  const boxes = [...panel.querySelectorAll("input")];
  const show = () => {
    const choice = boxes.reduce((sum, box) => sum + (box.checked ? 1 << Number(box.dataset.bit) : 0), 0);
    const [before, after] = [data.remaining_ns[0], data.remaining_ns[choice]];
    const share = (before - after) / before;
    document.getElementById("what-if-step").textContent = data.texts[choice];
    document.getElementById("what-if-change").textContent = choice === 0 ? "per step, nothing repaired"
      : `per step instead of ${data.texts[0]}, ${(Math.abs(share) * 100).toFixed(Math.abs(share) < .0995 ? 1 : 0)}% ${share < 0 ? "more" : "less"}`;
    document.getElementById("what-if-bar").setAttribute("width", String(Math.min(100, 100 * after / before)));
    clusterprof.remember({ repaired: choice || undefined });
  };
  for (const box of boxes) box.addEventListener("change", show);
  clusterprof.onState((state) => {
    if (state.repaired === undefined) return;
    for (const box of boxes) box.checked = Boolean(Number(state.repaired) >> Number(box.dataset.bit) & 1);
    show();
  });
})();
