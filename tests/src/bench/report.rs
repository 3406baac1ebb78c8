//! The output of a benchmark: tables for people during the run, one JSON object at the end.
//! Measures nothing.

use std::ops::RangeInclusive;

use serde_json::{Map, Value, json};

use super::measure::Samples;

/// The sayings of one benchmark.
#[derive(Debug)]
pub struct BenchmarkReport {
    name: String,
    figures: Map<String, Value>,
    spreads: Map<String, Value>,
    missing_figures: Vec<(String, String)>,
    missed_targets: Vec<(String, String)>,
    summary_figures: &'static [&'static str],
}

impl BenchmarkReport {
    /// Begins a report.
    pub fn new(name: &str, about: &str) -> Self {
        println!("benchmark {name}: {about}");
        Self {
            name: name.to_owned(),
            figures: Map::new(),
            spreads: Map::new(),
            missing_figures: Vec::new(),
            missed_targets: Vec::new(),
            summary_figures: &[],
        }
    }

    /// Prints a line.
    pub fn print_line(&self, text: &str) {
        println!("{text}");
    }

    /// Prints the heading of a part.
    pub fn print_section(&self, title: &str) {
        println!("\n== {title}");
    }

    /// Prints a table; the first row names the columns.
    pub fn print_table(&self, rows: &[Vec<String>]) {
        for line in format_table(rows) {
            println!("  {line}");
        }
    }

    /// Notes a figure that was counted or computed.
    pub fn add_figure(&mut self, key: &str, value: f64) {
        self.figures
            .insert(key.to_owned(), json!(round_figure(value)));
    }

    /// Notes the answer to a question.
    pub fn add_answer(&mut self, key: &str, answer: bool) {
        self.figures.insert(key.to_owned(), json!(answer));
    }

    /// Notes a figure with its target `aim`; the end of the report lists missed targets.
    pub fn add_figure_with_target(&mut self, key: &str, value: f64, aim: RangeInclusive<f64>) {
        self.add_figure(key, value);
        let bound = |bound: f64| match bound.is_infinite() {
            true => String::new(),
            false => format!("{bound}"),
        };
        let wanted = format!("{} … {}", bound(*aim.start()), bound(*aim.end()));
        let verdict = match aim.contains(&value) {
            true => "met",
            false => "MISSED",
        };
        println!("  {key}: {value:.4} (aim {wanted}: {verdict})");
        if !aim.contains(&value) {
            let found = format!("{value:.4}, aim {wanted}");
            self.missed_targets.push((key.to_owned(), found));
        }
    }

    /// Notes the median of a figure that was measured, and its spread.
    pub fn add_samples(&mut self, key: &str, samples: &Samples) {
        self.add_figure(key, samples.median());
        let spread = json!([round_figure(samples.min()), round_figure(samples.max())]);
        self.spreads.insert(key.to_owned(), spread);
    }

    /// Says loudly that a figure could not be measured, and why.
    pub fn add_missing(&mut self, key: &str, why: &str) {
        println!("  NOT MEASURED: {key}: {why}");
        self.figures.insert(key.to_owned(), Value::Null);
        self.missing_figures.push((key.to_owned(), why.to_owned()));
    }

    /// These figures, and no others, make the last line as JSON, in this order; `null` where there
    /// is none. The line before has all results.
    pub fn set_summary_figures(&mut self, figures: &'static [&'static str]) {
        self.summary_figures = figures;
    }

    /// Ends the report: lists the missing parts again; as JSON, the last line is one object.
    pub fn finish(self, as_json: bool) {
        println!("\n== {}: figures", self.name);
        for (key, value) in &self.figures {
            let spread = self.spreads.get(key);
            let spread = spread.map_or_else(String::new, |spread| format!("  {spread}"));
            println!("  {key:24} {value}{spread}");
        }
        for (key, why) in &self.missing_figures {
            println!("NOT MEASURED: {key}: {why}");
        }
        for (key, found) in &self.missed_targets {
            println!("MISSED: {key}: {found}");
        }
        if as_json {
            println!("{}", self.to_json());
            if !self.summary_figures.is_empty() {
                println!("{}", self.summary_line());
            }
        }
    }

    fn summary_line(&self) -> String {
        let pair = |key: &&str| {
            let value = match self.figures.get(*key) {
                Some(Value::Bool(answer)) => answer.to_string(),
                other => {
                    let value = other.and_then(Value::as_f64);
                    value.map_or_else(|| "null".to_owned(), |value| value.to_string())
                }
            };
            format!("\"{key}\":{value}")
        };
        let pairs: Vec<_> = self.summary_figures.iter().map(pair).collect();
        format!("{{{}}}", pairs.join(","))
    }

    fn to_json(&self) -> Value {
        let mut all = self.figures.clone();
        all.insert("spread".to_owned(), Value::Object(self.spreads.clone()));
        for (name, list) in [
            ("not_measured", &self.missing_figures),
            ("missed", &self.missed_targets),
        ] {
            if !list.is_empty() {
                let pairs = list.iter().map(|(key, why)| (key.clone(), json!(why)));
                all.insert(name.to_owned(), Value::Object(pairs.collect()));
            }
        }
        Value::Object(all)
    }
}

/// Four digits behind the point: more would be noise.
fn round_figure(value: f64) -> f64 {
    (value * 10_000.0).round() / 10_000.0
}

fn format_table(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| {
            let space = " ".repeat(width - cell.chars().count());
            format!("{cell}{space}")
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_columns_are_aligned() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        let lines = format_table(&[row(["way", "MB/s"]), row(["native …", "1"])]);
        assert_eq!(lines, ["way       MB/s", "native …  1"]);
    }

    #[test]
    fn missed_targets_are_reported() {
        let mut report = BenchmarkReport::new("test", "itself");
        report.add_figure_with_target("met", 1.0, 0.0..=1.0);
        assert_eq!(report.to_json()["missed"], Value::Null);
        report.add_figure_with_target("rate", 1.0, 2.0..=f64::INFINITY);
        report.add_figure_with_target("nothing", f64::NAN, 0.0..=1.0);
        let json = report.to_json();
        assert_eq!(json["missed"]["rate"], "1.0000, aim 2 … ");
        assert_eq!(json["nothing"], Value::Null);
        assert!(json["missed"]["nothing"].is_string());
    }

    #[test]
    fn missing_values_are_null_and_explained() {
        let mut report = BenchmarkReport::new("test", "itself");
        report.add_samples("ratio", &Samples::new(vec![1.0, 0.123_456]));
        report.add_missing("other", "no fio");
        let json = report.to_json();
        assert_eq!(json["ratio"], 0.5617);
        assert_eq!(json["spread"]["ratio"], json!([0.1235, 1.0]));
        assert_eq!(json["other"], Value::Null);
        assert_eq!(json["not_measured"]["other"], "no fio");
        report.add_figure("wrong", 0.0);
        report.add_answer("right", true);
        report.set_summary_figures(&["wrong", "ratio", "other", "third", "right"]);
        let line = r#"{"wrong":0,"ratio":0.5617,"other":null,"third":null,"right":true}"#;
        assert_eq!(report.summary_line(), line);
    }
}
