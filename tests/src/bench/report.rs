//! What a benchmark says: tables for people while it runs, one JSON object at the end. Measures
//! nothing.

use std::ops::RangeInclusive;

use serde_json::{Map, Value, json};

use super::measure::Samples;

/// The sayings of one benchmark.
#[derive(Debug)]
pub struct Report {
    name: String,
    figures: Map<String, Value>,
    spreads: Map<String, Value>,
    not_measured: Vec<(String, String)>,
    missed: Vec<(String, String)>,
    promised: &'static [&'static str],
}

impl Report {
    /// Begins a report.
    pub fn new(name: &str, about: &str) -> Self {
        println!("benchmark {name}: {about}");
        Self {
            name: name.to_owned(),
            figures: Map::new(),
            spreads: Map::new(),
            not_measured: Vec::new(),
            missed: Vec::new(),
            promised: &[],
        }
    }

    /// Prints a line.
    pub fn say(&self, text: &str) {
        println!("{text}");
    }

    /// Prints the heading of a part.
    pub fn section(&self, title: &str) {
        println!("\n== {title}");
    }

    /// Prints a table; the first row names the columns.
    pub fn table(&self, rows: &[Vec<String>]) {
        for line in lay_out(rows) {
            println!("  {line}");
        }
    }

    /// Notes a figure that was counted or computed.
    pub fn figure(&mut self, key: &str, value: f64) {
        self.figures.insert(key.to_owned(), json!(rounded(value)));
    }

    /// Notes a figure that is meant to lie in `aim`; the end of the report says what does not.
    pub fn aimed(&mut self, key: &str, value: f64, aim: RangeInclusive<f64>) {
        self.figure(key, value);
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
            self.missed.push((key.to_owned(), found));
        }
    }

    /// Notes the median of a figure that was measured, and its spread.
    pub fn measured(&mut self, key: &str, samples: &Samples) {
        self.figure(key, samples.median());
        let spread = json!([rounded(samples.min()), rounded(samples.max())]);
        self.spreads.insert(key.to_owned(), spread);
    }

    /// Says loudly that a figure could not be measured, and why.
    pub fn not_measured(&mut self, key: &str, why: &str) {
        println!("  NOT MEASURED: {key}: {why}");
        self.figures.insert(key.to_owned(), Value::Null);
        self.not_measured.push((key.to_owned(), why.to_owned()));
    }

    /// These figures, and no others, make the last line as JSON, in this order; `null` where there
    /// is none. All that was found is the line before.
    pub fn promise(&mut self, figures: &'static [&'static str]) {
        self.promised = figures;
    }

    /// Ends the report: says again what is missing; as JSON, the last line is one object.
    pub fn end(self, as_json: bool) {
        println!("\n== {}: figures", self.name);
        for (key, value) in &self.figures {
            let spread = self.spreads.get(key);
            let spread = spread.map_or_else(String::new, |spread| format!("  {spread}"));
            println!("  {key:24} {value}{spread}");
        }
        for (key, why) in &self.not_measured {
            println!("NOT MEASURED: {key}: {why}");
        }
        for (key, found) in &self.missed {
            println!("MISSED: {key}: {found}");
        }
        if as_json {
            println!("{}", self.json());
            if !self.promised.is_empty() {
                println!("{}", self.promised_line());
            }
        }
    }

    fn promised_line(&self) -> String {
        let pair = |key: &&str| {
            let value = self.figures.get(*key).and_then(Value::as_f64);
            let value = value.map_or_else(|| "null".to_owned(), |value| value.to_string());
            format!("\"{key}\":{value}")
        };
        let pairs: Vec<_> = self.promised.iter().map(pair).collect();
        format!("{{{}}}", pairs.join(","))
    }

    fn json(&self) -> Value {
        let mut all = self.figures.clone();
        all.insert("spread".to_owned(), Value::Object(self.spreads.clone()));
        for (name, list) in [
            ("not_measured", &self.not_measured),
            ("missed", &self.missed),
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
fn rounded(value: f64) -> f64 {
    (value * 10_000.0).round() / 10_000.0
}

fn lay_out(rows: &[Vec<String>]) -> Vec<String> {
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
    fn columns_stand_below_each_other() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        let lines = lay_out(&[row(["way", "MB/s"]), row(["native …", "1"])]);
        assert_eq!(lines, ["way       MB/s", "native …  1"]);
    }

    #[test]
    fn what_misses_its_aim_is_told() {
        let mut report = Report::new("test", "itself");
        report.aimed("met", 1.0, 0.0..=1.0);
        assert_eq!(report.json()["missed"], Value::Null);
        report.aimed("rate", 1.0, 2.0..=f64::INFINITY);
        report.aimed("nothing", f64::NAN, 0.0..=1.0);
        let json = report.json();
        assert_eq!(json["missed"]["rate"], "1.0000, aim 2 … ");
        assert_eq!(json["nothing"], Value::Null);
        assert!(json["missed"]["nothing"].is_string());
    }

    #[test]
    fn what_is_missing_is_null_and_explained() {
        let mut report = Report::new("test", "itself");
        report.measured("ratio", &Samples::new(vec![1.0, 0.123_456]));
        report.not_measured("other", "no fio");
        let json = report.json();
        assert_eq!(json["ratio"], 0.5617);
        assert_eq!(json["spread"]["ratio"], json!([0.1235, 1.0]));
        assert_eq!(json["other"], Value::Null);
        assert_eq!(json["not_measured"]["other"], "no fio");
        report.figure("wrong", 0.0);
        report.promise(&["wrong", "ratio", "other", "third"]);
        let line = r#"{"wrong":0,"ratio":0.5617,"other":null,"third":null}"#;
        assert_eq!(report.promised_line(), line);
    }
}
