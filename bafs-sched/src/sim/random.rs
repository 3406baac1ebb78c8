//! Random times by integer (or exactly rounded) arithmetic alone, so that they are the same on
//! every machine. Holds no state.

use crate::dice::Dice;

/// Uniform numbers whose sum stands for one normal number.
const UNIFORMS: u32 = 12;

/// `mean` varied normally with a standard deviation of `deviation_ppm` millionths of it, never
/// below zero. The normal number is the sum of twelve uniform ones.
pub(super) fn normal(dice: &mut Dice, mean: u64, deviation_ppm: u64) -> u64 {
    const ONE: i128 = 1 << 32;
    let sum: i128 = (0..UNIFORMS).map(|_| i128::from(dice.below(1 << 32))).sum();
    let deviations = sum - i128::from(UNIFORMS / 2) * ONE;
    let unit = i128::from(mean) * i128::from(deviation_ppm) / 1_000_000;
    let varied = i128::from(mean) + unit * deviations / ONE;
    u64::try_from(varied.max(0)).unwrap_or(u64::MAX)
}

/// An exponentially distributed time with this mean.
pub(super) fn exponential(dice: &mut Dice, mean: u64) -> u64 {
    let uniform = (dice.below(1 << 53) + 1) as f64 / (1u64 << 53) as f64;
    (-natural_logarithm(uniform) * mean as f64) as u64
}

/// ln of a number in (0, 1], by a series: the platform's own differs between machines.
fn natural_logarithm(x: f64) -> f64 {
    const LN_2: f64 = std::f64::consts::LN_2;
    let bits = x.to_bits();
    let exponent = (bits >> 52) as i64 - 1023;
    let mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    let t = (mantissa - 1.0) / (mantissa + 1.0);
    let (mut power, mut sum) = (t, 0.0);
    for k in 0..24 {
        sum += power / f64::from(2 * k + 1);
        power *= t * t;
    }
    exponent as f64 * LN_2 + 2.0 * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_mean_and_the_deviation_asked_for() {
        let mut dice = Dice::new(1);
        let (count, mean) = (20_000, 5_000_000u64);
        let found: Vec<f64> = (0..count)
            .map(|_| normal(&mut dice, mean, 100_000) as f64)
            .collect();
        let average = found.iter().sum::<f64>() / f64::from(count);
        let variance = found.iter().map(|x| (x - average).powi(2)).sum::<f64>() / f64::from(count);
        assert!((average / mean as f64 - 1.0).abs() < 0.003, "{average}");
        assert!(
            (variance.sqrt() / 500_000.0 - 1.0).abs() < 0.02,
            "{variance}"
        );
        let sum: u64 = (0..count).map(|_| exponential(&mut dice, mean)).sum();
        let average = sum as f64 / f64::from(count);
        assert!((average / mean as f64 - 1.0).abs() < 0.03, "{average}");
        assert_eq!(normal(&mut dice, 10, 0), 10);
    }

    #[test]
    fn the_logarithm_is_one() {
        for x in [1.0, 0.5, 0.999, 1e-9, 0.123_456] {
            assert!((natural_logarithm(x) - x.ln()).abs() < 1e-12, "{x}");
        }
    }
}
