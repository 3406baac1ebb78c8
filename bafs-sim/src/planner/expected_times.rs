//! Two results of probability theory that the corrected model needs: the expected maximum of
//! normal variables, and the response time of a shared link. No randomness, nothing of workloads.

use crate::deterministic_math::{exponential, natural_logarithm};

/// Customers up to which the exact recursion is worth its time; beyond, the link has as much to do
/// as with so many, or is saturated.
const CUSTOMERS_EXACT_MAX: u64 = 65_536;

/// The expected maximum of `count` standard normal variables, by Blom's approximation
/// Φ⁻¹((n - 3/8) / (n + 1/4)) (G. Blom, *Statistical Estimates and Transformed Beta-Variables*,
/// 1958): within 0.02 of the exact order statistic for every n. 0 for `count` ≤ 1.
pub(super) fn expected_maximum_normal(count: u64) -> f64 {
    if count <= 1 {
        return 0.0;
    }
    // Above, the fraction would round to 1, and its quantile be infinite.
    let count = count.min(1 << 40) as f64;
    normal_quantile((count - 0.375) / (count + 0.25))
}

/// The seconds that a customer spends at a processor-sharing link on which it has `demand_s` of
/// work, when `customers` circulate between the link and `think_s` of other work: exact mean-value
/// analysis of a closed network with one queue (M. Reiser and S. Lavenberg, JACM 27, 1980).
///
/// At least `demand_s`, at most `customers · demand_s`; it grows with each argument but `think_s`.
pub(super) fn expected_response_s(customers: u64, demand_s: f64, think_s: f64) -> f64 {
    if customers <= 1 || demand_s <= 0.0 {
        return demand_s.max(0.0);
    }
    let mut queue = 0.0;
    let mut response = demand_s;
    for present in 1..=customers.min(CUSTOMERS_EXACT_MAX) {
        response = demand_s * (1.0 + queue);
        queue = present as f64 * response / (think_s + response);
    }
    response.max(customers as f64 * demand_s - think_s)
}

/// Computing times: normal, but never below zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ComputeTimes {
    /// Mean of the normal variable.
    normal_mean_s: f64,
    /// Deviation of the normal variable.
    normal_deviation_s: f64,
    /// Mean after values below zero are set to zero.
    pub(super) mean_s: f64,
    /// Its standard deviation.
    pub(super) deviation_s: f64,
}

impl ComputeTimes {
    /// Normal times of which those below zero count as zero.
    pub(super) fn truncated_at_zero(mean_s: f64, deviation_s: f64) -> Self {
        let mut times = Self {
            normal_mean_s: mean_s,
            normal_deviation_s: deviation_s,
            mean_s,
            deviation_s,
        };
        if deviation_s > 0.0 {
            let ratio = mean_s / deviation_s;
            let (below, density) = (normal_probability(ratio), normal_density(ratio));
            times.mean_s = mean_s * below + deviation_s * density;
            let square = (mean_s * mean_s + deviation_s * deviation_s) * below
                + mean_s * deviation_s * density;
            times.deviation_s = (square - times.mean_s * times.mean_s).max(0.0).sqrt();
        }
        times
    }

    /// The longest rest among `count` jobs that are met at a random time, about: the one that 1 of
    /// `count` + 1 exceeds.
    pub(super) fn longest_remaining_s(&self, count: u64) -> f64 {
        let wanted = self.mean_s / (count as f64 + 1.0);
        let (mut low, mut high) = (0.0, self.mean_s + 12.0 * self.normal_deviation_s);
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            if self.tail_integral_s(middle) > wanted {
                low = middle;
            } else {
                high = middle;
            }
        }
        high
    }

    /// The integral of the probability that a job takes longer than `t`, from `from` on.
    fn tail_integral_s(&self, from: f64) -> f64 {
        let deviation = self.normal_deviation_s;
        if deviation <= 0.0 {
            return (self.mean_s - from).max(0.0);
        }
        let z = (from - self.normal_mean_s) / deviation;
        deviation * (normal_density(z) - z * normal_probability(-z)).max(0.0)
    }
}

fn normal_density(x: f64) -> f64 {
    exponential(-x * x / 2.0) / (2.0 * std::f64::consts::PI).sqrt()
}

/// Φ(x), by the series for small and the continued fraction for large arguments.
fn normal_probability(x: f64) -> f64 {
    if x < 0.0 {
        return 1.0 - normal_probability(-x);
    }
    if x > 3.0 {
        let fraction = (1..=40).rev().fold(x, |below, k| x + f64::from(k) / below);
        return 1.0 - normal_density(x) / fraction;
    }
    let (mut term, mut sum) = (x, x);
    for k in 1..60 {
        term *= x * x / f64::from(2 * k + 1);
        sum += term;
    }
    0.5 + normal_density(x) * sum
}

/// Φ⁻¹(`probability`) for 0.5 ≤ `probability` < 1: Wichura's AS 241 (PPND7), good to seven digits.
fn normal_quantile(probability: f64) -> f64 {
    let q = probability - 0.5;
    if q <= 0.425 {
        let r = 0.180_625 - q * q;
        let above = polynomial(
            r,
            [
                3.387_132_717_9,
                50.434_271_938,
                159.291_132_02,
                59.109_374_720,
            ],
        );
        let below = polynomial(r, [1.0, 17.895_169_469, 78.757_757_664, 67.187_563_600]);
        return q * above / below;
    }
    let r = (-natural_logarithm(1.0 - probability)).sqrt();
    if r <= 5.0 {
        let r = r - 1.6;
        let above = polynomial(
            r,
            [
                1.423_437_277_7,
                2.756_815_390_0,
                1.306_728_481_6,
                0.170_238_211_03,
            ],
        );
        above / polynomial(r, [1.0, 0.737_001_642_50, 0.120_211_329_75, 0.0])
    } else {
        let r = r - 5.0;
        let above = polynomial(
            r,
            [
                6.657_905_115_0,
                3.081_226_386_0,
                0.428_682_943_37,
                0.017_337_203_997,
            ],
        );
        above / polynomial(r, [1.0, 0.241_978_947_25, 0.012_258_202_635, 0.0])
    }
}

fn polynomial(x: f64, coefficients: [f64; 4]) -> f64 {
    coefficients
        .iter()
        .rev()
        .fold(0.0, |sum, coefficient| sum * x + coefficient)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_normal_maxima_match_published_tables() {
        // Expected largest order statistics (H. Harter, Biometrika 48, 1961).
        for (count, exact) in [
            (1, 0.0),
            (2, 0.5642),
            (5, 1.1630),
            (10, 1.5388),
            (50, 2.2491),
            (100, 2.5076),
            (400, 2.9685),
        ] {
            let found = expected_maximum_normal(count);
            assert!(
                (found - exact).abs() < 0.03,
                "{count}: {found} is not {exact}"
            );
        }
        let huge = expected_maximum_normal(u64::MAX);
        assert!((7.0..7.5).contains(&huge), "{huge}");
    }

    #[test]
    fn times_below_zero_count_as_zero() {
        let usual = ComputeTimes::truncated_at_zero(100.0, 10.0);
        assert!((usual.mean_s - 100.0).abs() < 1e-6 && (usual.deviation_s - 10.0).abs() < 1e-6);
        // E max(0, N(0, 1)) = 1 / sqrt(2 pi), its square's mean is 1/2.
        let half = ComputeTimes::truncated_at_zero(0.0, 1.0);
        assert!((half.mean_s - 0.398_942).abs() < 1e-5, "{half:?}");
        assert!((half.deviation_s - 0.583_819).abs() < 1e-5, "{half:?}");
        assert!((normal_probability(1.96) - 0.975_002).abs() < 1e-6);
        assert!((normal_probability(-4.0) - 3.167_1e-5).abs() < 1e-8);
    }

    #[test]
    fn remaining_times_of_equal_jobs_are_uniform() {
        let even = ComputeTimes::truncated_at_zero(100.0, 0.0);
        assert!((even.longest_remaining_s(9) - 90.0).abs() < 1e-6);
    }

    #[test]
    fn link_response_time_grows_with_its_load() {
        assert_eq!(expected_response_s(1, 10.0, 100.0), 10.0);
        assert_eq!(expected_response_s(50, 0.0, 100.0), 0.0);
        assert!(
            (expected_response_s(50, 10.0, 0.0) - 500.0).abs() < 1e-6,
            "nothing else to do: all queue"
        );
        assert!(
            (expected_response_s(50, 10.0, 1e9) - 10.0).abs() < 0.01,
            "hardly ever two at once"
        );
        let saturated = expected_response_s(50, 500.0, 8_800.0);
        assert!(
            (saturated - (25_000.0 - 8_800.0)).abs() < 60.0,
            "{saturated}"
        );
        let (exact, asymptote) = (
            expected_response_s(65_536, 1.0, 1e3),
            expected_response_s(65_537, 1.0, 1e3),
        );
        assert!((exact - asymptote).abs() < 20.0, "{exact} {asymptote}");
        // Half as much to do as the link carries.
        let at_knee = |customers| expected_response_s(customers, 1.0, 65_536.0);
        assert!(at_knee(65_537) >= at_knee(65_536), "{}", at_knee(65_537));
    }
}
