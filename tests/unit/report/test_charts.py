"""Axes, thinning and lines of the charts."""

import math
import random
import re
import xml.etree.ElementTree as ElementTree

import pytest

from disaggkd_cli.page.charts import HEIGHT, LEFT, RIGHT, WIDTH, Series, axis, columns_chart, line_chart, thinned


def drawing(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", html, re.S).group(0))


@pytest.mark.parametrize("seed", range(20))
def test_an_axis_covers_its_range_with_round_ticks(seed):
    random.seed(seed)
    low = random.uniform(-1, 1) * 10 ** random.randint(-6, 6)
    high = low + random.random() * 10 ** random.randint(-6, 6)
    found = axis(low, high)
    assert found.low <= low + 1e-9 * abs(low) and found.high >= high - 1e-9 * abs(high)
    assert 2 <= len(found.ticks) <= 9
    steps = [b - a for a, b in zip(found.ticks, found.ticks[1:], strict=False)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)


def test_an_axis_of_one_value_has_room_around_it():
    found = axis(3.0, 3.0)
    assert found.low < 3.0 < found.high


def test_thinning_keeps_the_mean_and_drops_what_is_not_finite():
    points = [(float(i), math.sin(i / 50)) for i in range(4000)]
    few = thinned([*points, (4000.0, math.nan), (4001.0, math.inf)], 200)
    assert len(few) == 200
    assert sum(y for _, y in few) / 200 == pytest.approx(sum(y for _, y in points) / 4000)
    assert thinned(points[:10]) == points[:10]


def test_lines_stay_inside_the_drawing():
    points = [(float(i), random.gauss(0, 100)) for i in range(500)]
    svg = drawing(line_chart("any", [Series("a", "#123456", points), Series("b", "#654321", points[:3], dots=True)]))
    places = [float(n) for line in svg.iter("polyline") for pair in line.get("points").split() for n in pair.split(",")]
    assert min(places[::2]) >= LEFT - 0.1 and max(places[::2]) <= WIDTH - RIGHT + 0.1
    assert min(places[1::2]) >= 0 and max(places[1::2]) <= HEIGHT


def test_lines_that_coincide_have_different_widths_and_others_the_same():
    first = [(float(i), float(i)) for i in range(10)]
    other = [(float(i), 9.0 - i) for i in range(10)]
    widths = {}
    for name, second in (("equal", first), ("apart", other)):
        svg = drawing(line_chart("any", [Series("a", "red", first), Series("b", "blue", second)]))
        widths[name] = [float(line.get("stroke-width")) for line in svg.iter("polyline")]
    assert widths["equal"][0] > widths["equal"][1] and widths["apart"][0] == widths["apart"][1]


def test_a_chart_of_nothing_says_so():
    for html in (line_chart("any", [Series("a", "red", [])]), columns_chart("any", [("a", "red")], [])):
        assert "nothing recorded yet" in html and "<svg" not in html


def test_a_very_slow_step_does_not_flatten_the_others():
    html = columns_chart("any", [("a", "red")], [(1.0, [100.0]), *((float(i), [1.0]) for i in range(2, 30))])
    heights = sorted(float(rect.get("height")) for rect in drawing(html).iter("rect"))
    assert heights[0] > 0.2 * heights[-1]
    assert "Cut off at the top: 1, the highest 100" in html
