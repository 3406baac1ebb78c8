//! The command line of a benchmark. Runs nothing.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

/// How a benchmark shall run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// The last line is a JSON object.
    pub json: bool,
    /// Fewer repetitions and smaller data: to see that it works, not to quote.
    pub quick: bool,
    /// Only these parts; empty for all.
    pub only: Vec<String>,
    /// Only these points of a curve, as numbers on its axis; empty for all.
    pub points: Vec<u64>,
    /// Another build of the program, for a comparison.
    pub before: Option<PathBuf>,
}

impl Options {
    /// Understands `--json`, `--quick`, `--only PART,PART`, `--points NUMBER,NUMBER`
    /// and `--before PROGRAM`.
    ///
    /// # Errors
    /// Anything else.
    pub fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self::default();
        let mut rest = arguments.iter().map(String::as_str);
        while let Some(argument) = rest.next() {
            match (argument, argument.strip_prefix("--only=")) {
                ("--json", _) => options.json = true,
                ("--quick", _) => options.quick = true,
                ("--only", _) => options.only = split_parts(rest.next().unwrap_or_default()),
                (_, Some(list)) => options.only = split_parts(list),
                ("--before", _) => {
                    let program = rest.next().context("--before: name a program")?;
                    options.before = Some(program.into());
                }
                ("--points", _) => options.points = parse_numbers(rest.next().unwrap_or_default())?,
                _ => bail!(
                    "'{argument}' is unknown; known are --json, --quick, --only PART,…, \
                     --points NUMBER,…, --before PROGRAM"
                ),
            }
        }
        Ok(options)
    }

    /// Whether a part shall run.
    pub fn is_part_selected(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|wanted| wanted == part)
    }

    /// The points of a curve to measure.
    ///
    /// # Errors
    /// Others are asked for, and none of these.
    pub fn select_points(&self, all: &[u64]) -> Result<Vec<u64>> {
        let is_wanted = |point: &u64| self.points.is_empty() || self.points.contains(point);
        let wanted: Vec<u64> = all.iter().copied().filter(is_wanted).collect();
        ensure!(!wanted.is_empty(), "the points are {all:?}");
        Ok(wanted)
    }

    /// One of two values: for a full run, for a quick one.
    pub fn choose<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }
}

fn split_parts(list: &str) -> Vec<String> {
    let parts = list.split(',').map(str::trim);
    parts.filter(|p| !p.is_empty()).map(str::to_owned).collect()
}

fn parse_numbers(list: &str) -> Result<Vec<u64>> {
    let number = |part: String| {
        part.parse()
            .with_context(|| format!("'{part}' is no number"))
    };
    split_parts(list).into_iter().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options> {
        let words: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
        Options::parse(&words)
    }

    #[test]
    fn known_options_are_parsed_and_others_refused() {
        let options = parse("--json --only link,warm").expect("options");
        assert!(options.json && !options.quick);
        assert!(options.is_part_selected("warm") && !options.is_part_selected("knee"));
        assert!(parse("--quick").expect("options").is_part_selected("knee"));
        assert_eq!(parse("--only=a").expect("options").only, ["a"]);
        assert!(parse("--fast").is_err());
        let options = parse("--points 50,110").expect("options");
        assert_eq!(
            options.select_points(&[12, 50, 110]).expect("points"),
            [50, 110]
        );
        assert!(
            options.select_points(&[20]).is_err(),
            "the curve has none of them"
        );
        assert!(parse("--points many").is_err());
        let before = parse("--before /bin/true").expect("options").before;
        assert_eq!(before, Some("/bin/true".into()));
        assert!(parse("--before").is_err());
    }
}
