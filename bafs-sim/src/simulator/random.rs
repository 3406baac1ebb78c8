//! Random times by integer (or exactly rounded) arithmetic alone, so that they are the same on
//! every machine. Holds no state.

use crate::deterministic_math::natural_logarithm;
use crate::seeded_rng::SeededRng;

/// Uniform numbers whose sum approximates one normal number.
const UNIFORMS: u32 = 12;

/// `mean` varied normally with a standard deviation of `deviation_ppm` millionths of it, never
/// below zero. The normal number is the sum of twelve uniform ones.
pub(super) fn draw_normal(rng: &mut SeededRng, mean: u64, deviation_ppm: u64) -> u64 {
    const ONE: i128 = 1 << 32;
    let sum: i128 = (0..UNIFORMS)
        .map(|_| i128::from(rng.next_below(1 << 32)))
        .sum();
    let deviations = sum - i128::from(UNIFORMS / 2) * ONE;
    let unit = i128::from(mean) * i128::from(deviation_ppm) / 1_000_000;
    let varied = i128::from(mean) + unit * deviations / ONE;
    u64::try_from(varied.max(0)).unwrap_or(u64::MAX)
}

/// An exponentially distributed time with this mean.
pub(super) fn draw_exponential(rng: &mut SeededRng, mean: u64) -> u64 {
    let uniform = (rng.next_below(1 << 53) + 1) as f64 / (1u64 << 53) as f64;
    (-natural_logarithm(uniform) * mean as f64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_times_have_the_requested_mean_and_deviation() {
        let mut rng = SeededRng::new(1);
        let (count, mean) = (20_000, 5_000_000u64);
        let found: Vec<f64> = (0..count)
            .map(|_| draw_normal(&mut rng, mean, 100_000) as f64)
            .collect();
        let average = found.iter().sum::<f64>() / f64::from(count);
        let variance = found.iter().map(|x| (x - average).powi(2)).sum::<f64>() / f64::from(count);
        assert!((average / mean as f64 - 1.0).abs() < 0.003, "{average}");
        assert!(
            (variance.sqrt() / 500_000.0 - 1.0).abs() < 0.02,
            "{variance}"
        );
        let sum: u64 = (0..count).map(|_| draw_exponential(&mut rng, mean)).sum();
        let average = sum as f64 / f64::from(count);
        assert!((average / mean as f64 - 1.0).abs() < 0.03, "{average}");
        assert_eq!(draw_normal(&mut rng, 10, 0), 10);
    }
}
