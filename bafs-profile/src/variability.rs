//! How instances of a workload differ (Bent 2005, §6.3.1).

use serde::Serialize;

/// A figure over several instances.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Least.
    pub min: f64,
    /// Most.
    pub max: f64,
    /// Standard deviation of the sample, divided by the mean; 0 for one instance.
    pub variation: f64,
}

impl Spread {
    /// Of these values; all 0 without one.
    pub fn of(values: &[f64]) -> Self {
        let Some(first) = values.first() else {
            return Self::default();
        };
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let deviation = match values.len() {
            1 => 0.0,
            _ => (squares / (count - 1.0)).sqrt(),
        };
        Self {
            mean,
            min: values.iter().copied().fold(*first, f64::min),
            max: values.iter().copied().fold(*first, f64::max),
            variation: if mean == 0.0 { 0.0 } else { deviation / mean },
        }
    }
}

/// How the instances of one stage differ.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageSpread {
    /// The stage.
    pub stage: String,
    /// How many instances have it.
    pub instances: u64,
    /// Real time, in seconds.
    pub wall_s: Spread,
    /// Processor time, in seconds.
    pub cpu_s: Spread,
    /// Bytes read and written.
    pub traffic_bytes: Spread,
    /// Different bytes.
    pub unique_bytes: Spread,
    /// Resident memory, in bytes.
    pub memory_bytes: Spread,
    /// Files.
    pub files: Spread,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variation_is_relative_to_the_mean() {
        let spread = Spread::of(&[8.0, 12.0]);
        assert_eq!((spread.mean, spread.min, spread.max), (10.0, 8.0, 12.0));
        assert!((spread.variation - 8f64.sqrt() / 10.0).abs() < 1e-12);
        assert_eq!(Spread::of(&[5.0]).variation, 0.0);
    }
}
