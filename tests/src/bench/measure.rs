//! Repetitions and their statistics: rounds in which all variants take turns, medians, spreads,
//! ratios. Prints nothing.

use std::fmt;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use bafs_proto::time::Time;

/// One way to do something, measured as a number: seconds, MB/s, a ratio.
pub struct BenchmarkVariant<'a> {
    /// Its name, for tables.
    pub name: &'a str,
    /// Does it once.
    pub run: Box<dyn FnMut() -> Result<f64> + 'a>,
}

impl fmt::Debug for BenchmarkVariant<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Way({})", self.name)
    }
}

impl<'a> BenchmarkVariant<'a> {
    /// A way with its name.
    pub fn new(name: &'a str, run: impl FnMut() -> Result<f64> + 'a) -> Self {
        let run = Box::new(run);
        Self { name, run }
    }
}

/// Runs every way once in each round. Every second round runs backwards, and after two rounds
/// another variant begins. So slow drifts (clock rates, other load) and the effects of one variant
/// on the next (dirty pages, numbers of removed files) hit all variants alike.
///
/// # Errors
/// That of a way, with its name.
pub fn run_interleaved(rounds: usize, ways: &mut [BenchmarkVariant<'_>]) -> Result<Vec<Samples>> {
    let mut values = vec![Vec::new(); ways.len()];
    for round in 0..rounds {
        let mut order: Vec<_> = (0..ways.len()).collect();
        order.rotate_left(round / 2 % ways.len().max(1));
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let way = &mut ways[index];
            let value = (way.run)().with_context(|| format!("{}, round {round}", way.name))?;
            values[index].push(value);
        }
    }
    Ok(values.into_iter().map(Samples::new).collect())
}

/// Values of repetitions, in the order of the rounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Takes values as they were measured.
    ///
    /// # Panics
    /// When there are none: a median of nothing is no figure.
    pub fn new(values: Vec<f64>) -> Self {
        assert!(!values.is_empty(), "a figure needs a measurement");
        Self(values)
    }

    /// How many values there are, at least one.
    #[expect(clippy::len_without_is_empty, reason = "there is always one")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The value in the middle.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        }
    }

    /// The smallest value.
    pub fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// The largest value.
    pub fn max(&self) -> f64 {
        self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }

    /// Each value divided by that of the same round of another way.
    pub fn ratio_to(&self, reference: &Self) -> Self {
        let pairs = self.0.iter().zip(&reference.0);
        Self::new(pairs.map(|(own, other)| own / other).collect())
    }

    /// Each value divided by a number that is known without measuring.
    pub fn divided_by(&self, number: f64) -> Self {
        Self::new(self.0.iter().map(|value| value / number).collect())
    }
}

impl fmt::Display for Samples {
    /// `median (min … max)`, with three digits that count.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (median, min, max) = (self.median(), self.min(), self.max());
        if self.0.len() == 1 {
            return write!(f, "{}", format_number(median));
        }
        write!(
            f,
            "{} ({} … {})",
            format_number(median),
            format_number(min),
            format_number(max)
        )
    }
}

/// A number as people read it: three digits behind the point below 10, none from 1000 on.
pub fn format_number(value: f64) -> String {
    match value.abs() {
        v if v < 10.0 => format!("{value:.3}"),
        v if v < 1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Runs a function and returns its seconds.
///
/// # Errors
/// The function's error.
#[expect(clippy::disallowed_methods, reason = "a benchmark measures time")]
pub fn time_seconds<T>(work: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
    let start = Instant::now();
    let value = work()?;
    Ok((start.elapsed().as_secs_f64(), value))
}

/// The machine's time, as journals have it.
#[expect(clippy::disallowed_methods, reason = "a benchmark measures time")]
pub fn time_of_day() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    Time(since.unwrap_or_default().as_millis() as u64)
}

/// Measures from its making on.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    /// Starts.
    #[expect(clippy::disallowed_methods, reason = "a benchmark measures time")]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}

/// A row of a table.
pub(super) fn table_row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_show_median_and_range() {
        let samples = Samples::new(vec![3.0, 1.0, 2.0]);
        assert_eq!(samples.to_string(), "2.000 (1.000 … 3.000)");
        let even = Samples::new(vec![4.0, 1.0]);
        assert!((even.median() - 2.5).abs() < 1e-9);
        assert_eq!(samples.divided_by(2.0), Samples::new(vec![1.5, 0.5, 1.0]));
    }

    #[test]
    fn methods_alternate_and_ratios_stay_within_rounds() {
        let order = std::cell::RefCell::new(String::new());
        let way = |name: &'static str, value: f64| {
            let order = &order;
            let mut rounds = 0.0;
            BenchmarkVariant::new(name, move || {
                order.borrow_mut().push_str(name);
                rounds += 1.0;
                Ok(value * rounds)
            })
        };
        let mut ways = [way("a", 1.0), way("b", 2.0), way("c", 4.0)];
        let found = run_interleaved(6, &mut ways).expect("runs");
        assert_eq!(*order.borrow(), "abccbabcaacbcabbac");
        assert_eq!(found[1].ratio_to(&found[0]), Samples::new(vec![2.0; 6]));
    }

    #[test]
    fn failed_method_is_named() {
        let fails = BenchmarkVariant::new("slow way", || anyhow::bail!("no"));
        let error = run_interleaved(1, &mut [fails]).expect_err("fails");
        assert!(format!("{error:#}").contains("slow way"), "{error:#}");
    }
}
