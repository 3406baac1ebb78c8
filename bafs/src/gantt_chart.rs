//! Gantt charts as SVG text, each row with room for a name and for words in its bars. Knows nothing
//! of runs.

use std::fmt::Write;

use crate::html_text::escape_html;
use crate::svg_chart::{Colour, format_number};
use crate::terminal_text;

/// Bars at most, and rows.
const BARS_MAX: usize = 20_000;
const ROWS_MAX: usize = 400;

/// Sizes in pixels: the whole, a row, the bar in it, and what is above and below the rows.
const WIDTH: f64 = 960.0;
const ROW_HEIGHT: f64 = 22.0;
const BAR_HEIGHT: f64 = 16.0;
const TITLE_HEIGHT: f64 = 28.0;
const LEGEND_HEIGHT: f64 = 24.0;
const AXIS_HEIGHT: f64 = 44.0;
const RIGHT_MARGIN: f64 = 24.0;

/// Letters of 12 pixels are about so wide in a font without serifs, and names have so many.
const LETTER_WIDTH: f64 = 6.7;
const NAME_LETTERS_MAX: usize = 28;

/// A bar is at least so wide, and so far from the next one that people tell them apart.
const BAR_WIDTH_MIN: f64 = 1.5;
const BAR_GAP: f64 = 1.0;

/// About so many numbers are at the axis.
const TICKS: f64 = 8.0;

/// One bar.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bar {
    /// Position of its row.
    pub(crate) row: usize,
    /// Where it begins, on the axis.
    pub(crate) from: f64,
    /// Where it ends, on the axis.
    pub(crate) until: f64,
    /// What it is.
    pub(crate) colour: Colour,
    /// What is written in it if there is room, and shown under a pointer; may be empty.
    pub(crate) label: String,
}

/// Bars in rows over an axis.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Gantt {
    /// Above it.
    pub(crate) title: String,
    /// Below it.
    pub(crate) x: String,
    /// Names of the rows, from above.
    pub(crate) rows: Vec<String>,
    /// The bars.
    pub(crate) bars: Vec<Bar>,
    /// What the colours mean: between the title and the rows, over no bar.
    pub(crate) legend: Vec<(String, Colour)>,
}

/// Where things are in the picture.
struct Layout {
    left: f64,
    top: f64,
    /// Pixels for each unit of the axis.
    scale: f64,
    rows: usize,
}

impl Layout {
    fn x(&self, value: f64) -> f64 {
        self.left + value * self.scale
    }

    fn y(&self, row: usize) -> f64 {
        self.top + row as f64 * ROW_HEIGHT
    }

    fn bottom(&self) -> f64 {
        self.y(self.rows)
    }
}

impl Gantt {
    /// Draws it; rows and bars beyond what can be seen are left out, and the title says so.
    pub(crate) fn render_svg(&self) -> String {
        let rows = self.rows.len().clamp(1, ROWS_MAX);
        let names: Vec<String> = self
            .rows
            .iter()
            .take(rows)
            .map(|it| short_name(it))
            .collect();
        let shown = self.bars.iter().filter(|bar| bar.row < rows);
        let shown: Vec<&Bar> = shown.take(BARS_MAX).collect();
        let end = self.bars.iter().map(|bar| bar.until).fold(1e-3, f64::max);
        let letters = names.iter().map(|name| name.chars().count()).max();
        let left = 16.0 + LETTER_WIDTH * letters.unwrap_or(0) as f64;
        let layout = Layout {
            left,
            top: TITLE_HEIGHT + LEGEND_HEIGHT,
            scale: (WIDTH - left - RIGHT_MARGIN) / end,
            rows,
        };
        let height = layout.bottom() + AXIS_HEIGHT;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
        );
        self.write_title(&mut svg, self.bars.len() - shown.len());
        self.write_legend(&mut svg, left);
        self.write_axis(&mut svg, &layout, end);
        for (row, name) in names.iter().enumerate() {
            let y = layout.y(row) + ROW_HEIGHT / 2.0 + 4.0;
            write_text(&mut svg, (8.0, y), "start", name);
        }
        for bar in shown {
            write_bar(&mut svg, &layout, bar);
        }
        svg += "</svg>\n";
        svg
    }

    fn write_title(&self, svg: &mut String, left_out: usize) {
        let title = match left_out {
            0 => self.title.clone(),
            more => format!("{} ({more} more are not shown)", self.title),
        };
        let title = escape_html(&terminal_text::sanitize_line(&title));
        let middle = WIDTH / 2.0;
        let _ = writeln!(
            svg,
            "<text x=\"{middle}\" y=\"19\" text-anchor=\"middle\" font-size=\"16\">{title}</text>"
        );
    }

    fn write_legend(&self, svg: &mut String, left: f64) {
        let mut x = left;
        for (name, colour) in &self.legend {
            let (y, colour) = (TITLE_HEIGHT + 4.0, colour.css());
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>"
            );
            write_text(svg, (x + 17.0, y + 10.5), "start", name);
            x += 17.0 + LETTER_WIDTH * (name.chars().count() as f64 + 2.0);
        }
    }

    fn write_axis(&self, svg: &mut String, layout: &Layout, end: f64) {
        let (top, bottom) = (layout.top, layout.bottom());
        for row in (0..layout.rows).filter(|row| row % 2 == 1) {
            let (x, y, width) = (
                layout.left,
                layout.y(row),
                WIDTH - RIGHT_MARGIN - layout.left,
            );
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{ROW_HEIGHT}\" \
                 fill=\"#f5f5f5\"/>"
            );
        }
        let step = tick_step(end);
        let mut at = 0.0;
        while at <= end {
            let x = layout.x(at);
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.1} {top}V{bottom}\" stroke=\"#000\" stroke-opacity=\"0.15\"/>"
            );
            write_text(svg, (x, bottom + 16.0), "middle", &format_number(at));
            at += step;
        }
        let middle = layout.x(end / 2.0);
        write_text(svg, (middle, bottom + 34.0), "middle", &self.x);
    }
}

fn write_bar(svg: &mut String, layout: &Layout, bar: &Bar) {
    let (x, until) = (layout.x(bar.from), layout.x(bar.until.max(bar.from)));
    let width = (until - x - BAR_GAP).max(BAR_WIDTH_MIN);
    let y = layout.y(bar.row) + (ROW_HEIGHT - BAR_HEIGHT) / 2.0;
    let colour = bar.colour.css();
    let label = terminal_text::sanitize_line(&bar.label);
    let _ = write!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{BAR_HEIGHT}\" \
         fill=\"{colour}\">"
    );
    if !label.is_empty() {
        let _ = write!(svg, "<title>{}</title>", escape_html(&label));
    }
    *svg += "</rect>\n";
    // The name only; the rest is shown under the pointer.
    let name = label.split(',').next().unwrap_or_default();
    if !name.is_empty() && LETTER_WIDTH * name.chars().count() as f64 + 6.0 <= width {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\" fill=\"#fff\" pointer-events=\"none\">{}</text>",
            x + 3.0,
            y + BAR_HEIGHT - 4.0,
            escape_html(name)
        );
    }
}

fn write_text(svg: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let text = escape_html(&terminal_text::sanitize_line(text));
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"
    );
}

/// A name that fits beside a row.
fn short_name(name: &str) -> String {
    let letters = name.chars().count();
    match letters > NAME_LETTERS_MAX {
        true => {
            let kept: String = name.chars().take(NAME_LETTERS_MAX - 1).collect();
            format!("{kept}…")
        }
        false => name.to_owned(),
    }
}

/// A round distance of numbers at an axis that ends there.
fn tick_step(end: f64) -> f64 {
    let rough = end / TICKS;
    let power = 10f64.powf(rough.log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0];
    let factor = factors.into_iter().find(|it| it * power >= rough);
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gantt() -> Gantt {
        let bar = |row, label: &str| Bar {
            row,
            from: 1.0,
            until: 2.0,
            colour: Colour::SUCCESS,
            label: label.to_owned(),
        };
        Gantt {
            title: "jobs".to_owned(),
            x: "s".to_owned(),
            rows: vec!["n1".to_owned(), "n2".to_owned()],
            bars: vec![bar(0, "<b>, done"), bar(1, "")],
            legend: vec![("done".to_owned(), Colour::SUCCESS)],
        }
    }

    #[test]
    fn gantt_chart_counts_omitted_bars() {
        let mut gantt = gantt();
        let text = gantt.render_svg();
        assert!(text.starts_with("<svg") && text.ends_with("</svg>\n"));
        assert!(text.contains("n2") && text.contains("done"));
        assert!(text.contains("<title>&lt;b&gt;, done</title>"), "{text}");
        let mut more = gantt.bars[0].clone();
        more.row = 2;
        gantt.bars.push(more);
        let text = gantt.render_svg();
        assert!(text.contains("1 more are not shown"), "{text}");
    }

    #[test]
    fn legend_is_above_all_rows() {
        let text = gantt().render_svg();
        let y_of = |part: &str| -> f64 {
            let at = text.find(part).expect("it is drawn");
            let rest = text[..at].rsplit(" y=\"").next().expect("it has a place");
            rest.split('"')
                .next()
                .and_then(|it| it.parse().ok())
                .expect("a number")
        };
        let first_bar = y_of("\" fill=\"#009e73\"><title>");
        assert!(y_of("\" text-anchor=\"start\">done") < first_bar);
    }

    #[test]
    fn numbers_at_an_axis_are_round() {
        for (end, step) in [(1.0, 0.2), (10.0, 2.0), (37.0, 5.0), (80.0, 10.0)] {
            assert!(
                (tick_step(end) - step).abs() < 1e-9,
                "{end}: {}",
                tick_step(end)
            );
        }
    }
}
