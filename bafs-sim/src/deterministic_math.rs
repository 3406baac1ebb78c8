//! Exponentials and logarithms by basic arithmetic alone, which is rounded alike everywhere: those
//! of the platform differ between machines in their last digit, and a choice may hang on that.

use std::f64::consts::LN_2;

/// Terms of the series of the exponential: the last is below 1e-18 of the sum.
const EXPONENTIAL_TERMS: u32 = 18;

/// ln of a positive normal number.
pub(crate) fn natural_logarithm(x: f64) -> f64 {
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

/// `base`, which is positive and normal, to the power of `exponent`.
pub(crate) fn power(base: f64, exponent: f64) -> f64 {
    exponential(exponent * natural_logarithm(base))
}

/// e to the power of a number below 709; zero where that is no normal number.
pub(crate) fn exponential(x: f64) -> f64 {
    if x < -708.0 {
        return 0.0;
    }
    // e^x = 2^n · e^r with r at most half of ln 2 from zero.
    debug_assert!(x < 709.0, "{x} is beyond the largest number");
    let n = (x / LN_2).round() as i64;
    let r = x - n as f64 * LN_2;
    let sum = (1..=EXPONENTIAL_TERMS)
        .rev()
        .fold(1.0, |sum, k| 1.0 + r / f64::from(k) * sum);
    sum * f64::from_bits(((n + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_match_the_platform_except_for_last_digits() {
        for x in [1.0, 0.5, 0.999, 1e-9, 0.123_456, 3.5, 1e12] {
            assert!((natural_logarithm(x) - x.ln()).abs() < 1e-12, "{x}");
        }
        for x in [
            0.0, -1e-9, -0.3, -0.35, -1.0, -2.5, -72.0, -500.0, -707.9, 0.4, 7.0, 708.9,
        ] {
            assert!((exponential(x) / x.exp() - 1.0).abs() < 1e-12, "{x}");
        }
        assert_eq!((exponential(-1e9), power(7.0, 0.0)), (0.0, 1.0));
        assert!((power(1e5, 0.5) / 1e5f64.sqrt() - 1.0).abs() < 1e-12);
    }
}
