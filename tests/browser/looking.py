"""What tests ask a page: is something too wide, can it be read, what does it say."""

from __future__ import annotations

from typing import Any

_OVERFLOW = """
() => [...document.querySelectorAll("body *")].filter((node) => {
  const box = node.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 1) return false;
  for (let up = node; up; up = up.parentElement) {
    if (["auto", "scroll", "hidden"].includes(getComputedStyle(up).overflowX)) return false;
    if (up.tagName === "svg") return false;
  }
  return true;
}).map((node) => `${node.tagName} ${node.className} ${node.textContent.slice(0, 40)}`)
"""

_OVERLAPS = """
() => [...document.querySelectorAll(".chart > svg")].flatMap((chart) => {
  const found = [...chart.querySelectorAll("text")].map((node) => [node.textContent, node.getBoundingClientRect()]);
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  return found.flatMap(([text, box], at) => found.slice(at + 1).filter(([, other]) => meet(box, other)).map(([other]) => `${text} | ${other}`));
})
"""  # noqa: E501

_CONTRAST = r"""
(selector) => {
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = (color) => {
    const [red, green, blue] = color.match(/[\d.]+/g).map((part) => linear(Number(part) / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const node = document.querySelector(selector);
  const back = (of) => getComputedStyle(of).backgroundColor;
  let behind = node;
  while (["rgba(0, 0, 0, 0)", "transparent"].includes(back(behind))) behind = behind.parentElement;
  const [high, low] = [light(getComputedStyle(node).color), light(back(behind))].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}
"""


def texts(page: Any, selector: str) -> list[str]:
    """What the elements of a selector say, in one line each."""
    return [" ".join(text.split()) for text in page.locator(selector).all_inner_texts()]


def overflow(page: Any) -> list[str]:
    """Elements that stick out of the window, but for those inside of something that scrolls."""
    found: list[str] = page.evaluate(_OVERFLOW)
    return found


def overlaps(page: Any) -> list[str]:
    """Texts of charts that are written upon each other."""
    found: list[str] = page.evaluate(_OVERLAPS)
    return found


def contrast(page: Any, selector: str) -> float:
    """Of a text and what is behind it, as WCAG defines it."""
    found: float = page.evaluate(_CONTRAST, selector)
    return found


def await_text(page: Any, selector: str, text: str) -> None:
    """Returns when one of the elements of a selector holds this text."""
    page.wait_for_function(
        "([selector, text]) => [...document.querySelectorAll(selector)].some((node) => "
        "node.textContent.includes(text))",
        arg=[selector, text],
    )


def await_count(page: Any, selector: str, least: int, most: int | None = None) -> None:
    """Returns when a selector has so many elements."""
    page.wait_for_function(
        "([selector, least, most]) => { const found = document.querySelectorAll(selector).length; "
        "return found >= least && found <= most; }",
        arg=[selector, least, least if most is None else most],
    )


def milliseconds(page: Any, script: str) -> float:
    """How long a script takes in the page: the shortest of several times, since a machine may be busy."""
    timed = f"() => {{ const began = performance.now(); {script}; return performance.now() - began; }}"
    return min(float(page.evaluate(timed)) for _ in range(8))
