"""A hook of mkdocs (mkdocs.yml): the pages of the site that are not in docs/.

README.md and the other pages beside it become pages of the site, and links between all of them are adapted.
The pages of the reference are made from the public names: those of ``everystep/__init__.pyi`` and of the
modules that users import.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/everystep"
BESIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
# Page, and where the names on it come from, as the public stub says.
GROUPS = {
    "Checkpointer": "everystep.checkpointer",
    "Save and load": "everystep.store",
    "What a state may hold": "everystep.state",
    "Shelf": "everystep.shelf",
    "Errors": "everystep.errors",
}
# Layers that users do not import from: the names above are what they offer.
INTERNAL = {
    *("caller", "checkpointer", "cli", "drill", "engine", "errors", "format", "integrations"),
    *("plan", "shelf", "state", "store"),
}
# Of these classes, what users call; the rest is for the Checkpointer.
MEMBERS = {"PendingSave": ("done", "result", "exception", "progress")}
# Users get these from calls: how they are made is nothing that the page shows.
MADE_BY_CALLS = {"Checkpoint", "PendingSave"}
LINK = re.compile(r"\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def public_names(module: str) -> list[str]:
    """Of a module that lists them in ``__all__``, imports them as ``NAME as NAME``, or else defines them."""
    base = ROOT / "src" / module.replace(".", "/")
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    tree = ast.parse(file.read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            if isinstance(node.value, ast.List):
                return sorted(ast.literal_eval(node.value))
            break  # computed from the imports below
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = sorted(alias.name for node in imports for alias in node.names if alias.asname == alias.name)
    made = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return found or [name for name in made if not name.startswith("_")]


def reference() -> dict[str, str]:
    """Title -> text of each page."""
    stub = (SOURCE / "__init__.pyi").read_text("utf-8")
    names = re.findall(r"^from (everystep\S+) import (\w+) as \2$", stub, re.MULTILINE)
    pages = {}
    for title, home in GROUPS.items():
        own = [(module, name) for module, name in names if module == home or module.startswith(home + ".")]
        entries = (f"::: {module}.{name}{members(name)}" for module, name in own)
        pages[title] = f"# {title}\n\n" + "\n\n".join(entries)
    known = ("everystep", *GROUPS.values())
    left = [name for module, name in names if module not in known and not module.startswith(known[1:])]
    if left:
        raise ValueError(f"on no page of the reference: {left}")
    others = sorted({path.stem for path in SOURCE.iterdir() if path.stem[0] != "_"} - INTERNAL - {"py"})
    folders = (path.name for path in (SOURCE / "integrations").iterdir() if path.is_dir())
    others += sorted(f"integrations.{name}" for name in folders if name[0] != "_" and name != "shared")
    for module in (f"everystep.{name}" for name in others):
        listed = "\n".join(f"        - {name}" for name in public_names(module))
        options = f"    options:\n      show_root_heading: false\n      members:\n{listed}\n"
        pages[module] = f"# {module}\n\n::: {module}\n{options}"
    return pages


def members(name: str) -> str:
    """The options that limit what a page shows of a class."""
    chosen = MEMBERS.get(name)
    options = [f"members: [{', '.join(chosen)}]"] if chosen else []
    if name in MADE_BY_CALLS:
        options.append("merge_init_into_class: false")
    return "\n    options:\n" + "\n".join(f"      {option}" for option in options) if options else ""


def on_config(config: Any) -> None:
    """Puts the pages of the reference where the navigation says REFERENCE."""
    pages = [{title: path(title)} for title in reference()]
    for entry in config["nav"]:
        if "Reference" in entry:
            entry["Reference"] = pages


def path(title: str) -> str:
    return f"reference/{re.sub(r'[^a-z0-9]+', '-', title.lower().removeprefix('everystep.'))}.md"


def on_files(files: Files, config: Any) -> None:
    for source, name in BESIDE.items():
        text = LINK.sub(lambda found: for_the_site(found, "docs/"), (ROOT / source).read_text("utf-8"))
        files.append(File.generated(config, name, content=text))
    for title, text in reference().items():
        files.append(File.generated(config, path(title), content=text))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    if page.file.generated_by is not None:
        return markdown
    return LINK.sub(lambda found: for_the_site(found, ""), markdown)


def title_of(page: Path) -> str:
    """What a link says on the site whose text is the name of the file."""
    return page.read_text("utf-8").partition("\n")[0].removeprefix("# ")


def for_the_site(found: re.Match[str], prefix: str) -> str:
    """Links to pages beside docs/ lead to pages of the site; links to other files become plain text."""
    text, link = found.groups()
    if re.match(r"https?://|mailto:|#", link):
        return found.group()
    target, hash_, anchor = link.partition("#")
    target = target.removeprefix("../")
    if text in (link, link.removeprefix("docs/")) and (ROOT / "docs" / link.removeprefix("docs/")).is_file():
        text = title_of(ROOT / "docs" / link.removeprefix("docs/"))
    if target in BESIDE:
        target = BESIDE[target]
    elif prefix and target.startswith(prefix):
        target = target.removeprefix(prefix)
    elif link.startswith("../") or prefix:
        return text
    return f"[{text}]({target}{hash_}{anchor})"
