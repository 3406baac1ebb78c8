//! Charts as SVG text. The only user of the plotting library; knows nothing of runs.

use std::fmt::Debug;

use anyhow::{Result, anyhow};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use crate::terminal_text;

/// Points of a curve at most; more would not be seen and make large files.
const POINTS_MAX: usize = 2_000;

const WIDTH: u32 = 960;
const HEIGHT: u32 = 320;
/// Letters of numbers and names, which fit a row, and of titles; sizes in pixels.
const LABEL_FONT: (&str, i32) = ("sans-serif", 12);
const TITLE_FONT: (&str, i32) = ("sans-serif", 16);

/// Colours that people with any eyes tell apart (Okabe and Ito, 2008).
const PALETTE: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(120, 120, 120),
    RGBColor(0, 0, 0),
];

/// A position in the palette; larger ones begin again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Colour(pub usize);

impl Colour {
    /// What was done.
    pub const SUCCESS: Self = Self(2);
    /// What failed.
    pub const FAILURE: Self = Self(5);
    /// What was lost after it was done.
    pub const LOST: Self = Self(1);
    /// What is under way.
    pub const ACTIVE: Self = Self(4);
    /// What was given up.
    pub const NEUTRAL: Self = Self(6);

    fn rgb(self) -> RGBColor {
        PALETTE[self.0 % PALETTE.len()]
    }

    /// As SVG and style sheets write it.
    pub fn css(self) -> String {
        let RGBColor(red, green, blue) = self.rgb();
        format!("#{red:02x}{green:02x}{blue:02x}")
    }
}

/// How the points of a curve are joined.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CurveStyle {
    /// By straight lines, with a mark at each point.
    #[default]
    Lines,
    /// Each value holds until the next.
    Steps,
}

/// A named curve.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Its name in the legend.
    pub name: String,
    /// Its points, ascending.
    pub points: Vec<(f64, f64)>,
}

/// What an axis shows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Axis {
    /// What, with its unit.
    pub title: String,
    /// Whether equal distances are equal factors.
    pub is_logarithmic: bool,
}

impl Axis {
    /// A linear axis.
    pub fn new(title: &str) -> Self {
        Self {
            title: title.to_owned(),
            is_logarithmic: false,
        }
    }

    fn position(&self, value: f64) -> f64 {
        if self.is_logarithmic {
            value.max(f64::MIN_POSITIVE).log10()
        } else {
            value
        }
    }

    fn format_label(&self, place: f64) -> String {
        format_number(if self.is_logarithmic {
            10f64.powf(place)
        } else {
            place
        })
    }
}

/// Curves over one axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// Above it.
    pub title: String,
    /// Across.
    pub x: Axis,
    /// Up; begins at zero unless it is logarithmic.
    pub y: Axis,
    /// How points are joined.
    pub curve_style: CurveStyle,
    /// The curves.
    pub curves: Vec<Curve>,
}

/// Squares over two axes, each of one of few kinds.
#[derive(Debug, Clone, PartialEq)]
pub struct CategoryMap {
    /// Above it.
    pub title: String,
    /// Across.
    pub x: Axis,
    /// Up.
    pub y: Axis,
    /// Values at the columns, ascending.
    pub columns: Vec<f64>,
    /// Values at the rows, ascending.
    pub rows: Vec<f64>,
    /// For each row, for each column, a position in `categories`; or none.
    pub cells: Vec<Vec<Option<usize>>>,
    /// Names of the kinds.
    pub categories: Vec<String>,
}

impl Chart {
    /// Draws it.
    ///
    /// # Errors
    /// When the library cannot draw it.
    pub fn render_svg(&self) -> Result<String> {
        let curves: Vec<Curve> = self
            .curves
            .iter()
            .map(|curve| self.scale_curve(curve))
            .collect();
        let all = || curves.iter().flat_map(|curve| &curve.points);
        let (x_low, x_high) = axis_range(all().map(|(x, _)| *x));
        let (y_low, y_high) = axis_range(all().map(|(_, y)| *y));
        let y_low = if self.y.is_logarithmic {
            y_low
        } else {
            y_low.min(0.0)
        };
        let y_high = y_high + (y_high - y_low) * 0.05;
        let mut text = String::new();
        {
            let root = SVGBackend::with_string(&mut text, (WIDTH, HEIGHT)).into_drawing_area();
            map_draw_error(root.fill(&WHITE))?;
            let mut chart = map_draw_error(
                ChartBuilder::on(&root)
                    .caption(terminal_text::sanitize_line(&self.title), TITLE_FONT)
                    .margin(8)
                    .margin_right(20)
                    .x_label_area_size(40)
                    .y_label_area_size(80)
                    .build_cartesian_2d(x_low..x_high, y_low..y_high),
            )?;
            map_draw_error(
                chart
                    .configure_mesh()
                    .light_line_style(WHITE)
                    .bold_line_style(BLACK.mix(0.12))
                    .x_desc(terminal_text::sanitize_line(&self.x.title))
                    .y_desc(terminal_text::sanitize_line(&self.y.title))
                    .x_label_formatter(&|x| self.x.format_label(*x))
                    .y_label_formatter(&|y| self.y.format_label(*y))
                    .label_style(LABEL_FONT)
                    .draw(),
            )?;
            for (at, curve) in curves.iter().enumerate() {
                let colour = Colour(at).rgb();
                let series = LineSeries::new(curve.points.iter().copied(), colour.stroke_width(2));
                let drawn_series = map_draw_error(chart.draw_series(series))?;
                drawn_series
                    .label(terminal_text::sanitize_line(&curve.name))
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour));
                if self.curve_style == CurveStyle::Lines {
                    let marks = curve.points.iter();
                    let marks = marks.map(|point| Circle::new(*point, 3, colour.filled()));
                    map_draw_error(chart.draw_series(marks))?;
                }
            }
            map_draw_error(
                chart
                    .configure_series_labels()
                    .position(SeriesLabelPosition::UpperLeft)
                    .background_style(WHITE.mix(0.8))
                    .border_style(BLACK.mix(0.2))
                    .label_font(LABEL_FONT)
                    .draw(),
            )?;
            map_draw_error(root.present())?;
        }
        Ok(text)
    }

    /// The curve with few enough points, in the places of the axes, as steps if it is to be so.
    fn scale_curve(&self, curve: &Curve) -> Curve {
        let every = curve.points.len().div_ceil(POINTS_MAX).max(1);
        let last = curve.points.len().saturating_sub(1);
        let kept = curve.points.iter().enumerate();
        let kept = kept.filter(|(at, _)| at % every == 0 || *at == last);
        let mut points: Vec<(f64, f64)> = Vec::new();
        for (_, (x, y)) in kept.filter(|(_, (x, y))| x.is_finite() && y.is_finite()) {
            let (x, y) = (self.x.position(*x), self.y.position(*y));
            if let (CurveStyle::Steps, Some(&(_, before))) = (self.curve_style, points.last()) {
                points.push((x, before));
            }
            points.push((x, y));
        }
        Curve {
            name: curve.name.clone(),
            points,
        }
    }
}

impl CategoryMap {
    /// Draws it.
    ///
    /// # Errors
    /// When the library cannot draw it.
    pub fn render_svg(&self) -> Result<String> {
        let (columns, rows) = (self.columns.len().max(1), self.rows.len().max(1));
        let of = |values: &[f64], place: f64| {
            let at = (place.floor().max(0.0) as usize).min(values.len().saturating_sub(1));
            values
                .get(at)
                .map_or_else(String::new, |value| format_number(*value))
        };
        let mut text = String::new();
        {
            let root = SVGBackend::with_string(&mut text, (WIDTH, 480)).into_drawing_area();
            map_draw_error(root.fill(&WHITE))?;
            let mut chart = map_draw_error(
                ChartBuilder::on(&root)
                    .caption(terminal_text::sanitize_line(&self.title), TITLE_FONT)
                    .margin(8)
                    .margin_right(20)
                    .x_label_area_size(40)
                    .y_label_area_size(80)
                    .build_cartesian_2d(0.0..columns as f64, 0.0..rows as f64),
            )?;
            map_draw_error(
                chart
                    .configure_mesh()
                    .disable_mesh()
                    .x_desc(terminal_text::sanitize_line(&self.x.title))
                    .y_desc(terminal_text::sanitize_line(&self.y.title))
                    .x_label_formatter(&|x| of(&self.columns, *x))
                    .y_label_formatter(&|y| of(&self.rows, *y))
                    .label_style(LABEL_FONT)
                    .draw(),
            )?;
            let cells = self.cells.iter().enumerate().flat_map(|(row, cells)| {
                let cells = cells.iter().enumerate();
                cells.filter_map(move |(column, kind)| kind.map(|kind| (row, column, kind)))
            });
            map_draw_error(chart.draw_series(cells.map(|(row, column, kind)| {
                let low = (column as f64, row as f64);
                let high = (low.0 + 1.0, low.1 + 1.0);
                Rectangle::new([low, high], Colour(kind).rgb().filled())
            })))?;
            for (kind, name) in self.categories.iter().enumerate() {
                add_legend_entry(&mut chart, terminal_text::sanitize_line(name), Colour(kind))?;
            }
            map_draw_error(
                chart
                    .configure_series_labels()
                    .position(SeriesLabelPosition::UpperRight)
                    .background_style(WHITE.mix(0.9))
                    .label_font(LABEL_FONT)
                    .draw(),
            )?;
            map_draw_error(root.present())?;
        }
        Ok(text)
    }
}

type PlotArea<'a, 'b> =
    ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// An entry of the legend without anything drawn.
fn add_legend_entry(chart: &mut PlotArea<'_, '_>, name: String, colour: Colour) -> Result<()> {
    let nothing = std::iter::empty::<Rectangle<(f64, f64)>>();
    let rgb = colour.rgb();
    map_draw_error(chart.draw_series(nothing))?
        .label(name)
        .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], rgb.filled()));
    Ok(())
}

/// A range that is never empty.
fn axis_range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    for value in values {
        (low, high) = (low.min(value), high.max(value));
    }
    match (low.is_finite() && high.is_finite(), high > low) {
        (true, true) => (low, high),
        (true, false) => (low - 0.5, low + 0.5),
        (false, _) => (0.0, 1.0),
    }
}

/// A number as people read it at an axis.
pub(crate) fn format_number(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        v if v >= 1e12 => (value / 1e12, "T"),
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        v if v >= 100.0 || v.fract() < 1e-9 => 0,
        v if v >= 1.0 => 1,
        _ => 3,
    };
    format!("{scaled:.digits$}{unit}")
}

fn map_draw_error<T, E: Debug>(result: std::result::Result<T, E>) -> Result<T> {
    result.map_err(|error| anyhow!("a chart cannot be drawn: {error:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_svg(text: &str) -> bool {
        text.starts_with("<svg") && text.trim_end().ends_with("</svg>")
    }

    #[test]
    fn charts_draw_curves_and_escape_names() {
        let mut chart = Chart {
            title: "<script>alert(1)</script>\u{1b}".to_owned(),
            x: Axis::new("time, s"),
            y: Axis::new("bytes"),
            curve_style: CurveStyle::Steps,
            curves: vec![Curve {
                name: "a\"><b>".to_owned(),
                points: vec![(0.0, 1.0), (5.0, 3.0), (f64::NAN, 1.0)],
            }],
        };
        let text = chart.render_svg().expect("it is drawn");
        assert!(is_svg(&text), "{text}");
        assert!(text.contains("&lt;script&gt;") && !text.contains("<script"));
        assert!(!text.contains("<b>") && !text.contains('\u{1b}'));
        chart.curves.clear();
        assert!(is_svg(
            &chart.render_svg().expect("an empty one is drawn as well")
        ));
        chart.x.is_logarithmic = true;
        chart.curve_style = CurveStyle::Lines;
        chart.curves.push(Curve {
            name: "all".to_owned(),
            points: (0..10_000).map(|x| (f64::from(x), 2.0)).collect(),
        });
        let text = chart.render_svg().expect("it is drawn");
        assert!(text.matches("<circle").count() <= POINTS_MAX + 1);
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.25, "0.250"),
            (12_000.0, "12k"),
            (1.5e9, "1.5G"),
        ] {
            assert_eq!(format_number(value), text);
        }
    }
}
