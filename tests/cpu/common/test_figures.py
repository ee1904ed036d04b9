"""SVGs are written without what draws nothing."""

import io
import re
import xml.etree.ElementTree as ET

import matplotlib

from kvforge.common.figures import compact_svg, new_figure


def test_a_compact_svg_draws_the_same() -> None:
    figure = new_figure(3, 2)
    figure.subplots().plot([0, 1e-7, 2], [3, 1, 2], marker="o", label="a  b")
    figure.axes[0].grid(alpha=0.3)
    for place in range(4):
        figure.text(0.1 * place, 0.5, 'a style="fill: none" b')
    written = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(written, format="svg")
    before, after = (ET.fromstring(data) for data in (written.getvalue(), compact_svg(written.getvalue())))
    before.remove(before[0])  # metadata
    classes: dict[str, str] = {}
    for sheet in after.iter("{http://www.w3.org/2000/svg}style"):
        assert sheet.text is not None
        classes |= dict(re.findall(r"\.([\w-]+)\{([^}]*)\}", sheet.text))
        sheet.text = re.sub(r"\.[\w-]+\{[^}]*\}", "", sheet.text)
    used = [one.attrib["class"] for one in after.iter() if "class" in one.attrib]
    assert set(used) == set(classes) and min(used.count(name) for name in classes) > 2

    def attributes(one: ET.Element) -> dict:
        """A text's first font, which is there, draws it; a group's name and a turn by nothing draw nothing."""
        found = {**one.attrib, "d": re.findall(r"[A-Za-z]|[^A-Za-z\s]+", one.get("d", ""))}
        style = classes.get(found.pop("class", ""), one.get("style", ""))
        found["style"] = re.sub(r"(font-family: '[^']*')[^;]*", r"\1", style)
        if one.tag.endswith("}g"):
            found.pop("id", None)
        if found.get("transform", "").startswith("rotate(-0 "):
            del found["transform"]
        return found

    def drawn(root: ET.Element) -> list:
        return [(one.tag, attributes(one), (one.text or "").strip()) for one in root.iter()]

    assert compact_svg(compact_svg(written.getvalue())) == compact_svg(written.getvalue())
    assert drawn(before) == drawn(after) and len(compact_svg(written.getvalue())) < len(written.getvalue())
