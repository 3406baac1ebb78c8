//! The accountant: what users had of the cluster, which counts less the longer ago it is. Decides
//! nothing.

use bafs_proto::time::Time;
use serde::{Deserialize, Serialize};

use crate::control::Resources;

/// Space is counted in these units, so that sums over years fit.
const MIB: u64 = 1 << 20;

/// What a user had, as it counts at a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Time of slots, in milliseconds.
    pub slot_ms: u64,
    /// Space times time, in MiB and seconds.
    pub mib_s: u64,
    /// Bytes over the link to home.
    pub home_bytes: u64,
    /// When it counts so.
    pub as_of: Time,
}

impl Usage {
    /// As it counts later.
    #[must_use]
    pub fn decayed(self, now: Time, half_life_ms: u64) -> Self {
        let elapsed_ms = now.ms_since(self.as_of);
        if elapsed_ms == 0 {
            return self;
        }
        let part = (-(elapsed_ms as f64) / half_life_ms.max(1) as f64).exp2();
        let decay = |value: u64| (value as f64 * part).round() as u64;
        Self {
            slot_ms: decay(self.slot_ms),
            mib_s: decay(self.mib_s),
            home_bytes: decay(self.home_bytes),
            as_of: now,
        }
    }

    /// Adds what was used now.
    pub fn charge(&mut self, slot_ms: u64, home_bytes: u64) {
        self.slot_ms = self.slot_ms.saturating_add(slot_ms);
        self.home_bytes = self.home_bytes.saturating_add(home_bytes);
    }

    /// Adds space that was kept for some time.
    pub fn charge_space(&mut self, bytes: u64, ms: u64) {
        let mib_s = u128::from(bytes) * u128::from(ms) / u128::from(MIB) / 1000;
        let mib_s = u64::try_from(mib_s).unwrap_or(u64::MAX);
        self.mib_s = self.mib_s.saturating_add(mib_s);
    }

    /// The largest part of any resource that the user had on average: 1 for who had all of one
    /// since ever. This is the dominant share of Ghodsi et al. (Dominant Resource Fairness, NSDI
    /// 2011), over time.
    pub fn dominant_share(self, capacity: Resources, half_life_ms: u64) -> f64 {
        // What decays by half in each half-life adds up to so many milliseconds.
        let memory_ms = half_life_ms.max(1) as f64 / std::f64::consts::LN_2;
        let share = |used: f64, all: f64| if all > 0.0 { used / all } else { 0.0 };
        let slots = share(self.slot_ms as f64, capacity.slots as f64 * memory_ms);
        let space = capacity.bytes as f64 / MIB as f64 * memory_ms / 1000.0;
        let space = share(self.mib_s as f64, space);
        let home = capacity.home_bytes_per_s as f64 * memory_ms / 1000.0;
        let home = share(self.home_bytes as f64, home);
        slots.max(space).max(home)
    }
}

/// The largest part of any resource.
pub fn dominant_part(used: Resources, capacity: Resources) -> f64 {
    let share = |used: u64, all: u64| {
        if all > 0 {
            used as f64 / all as f64
        } else {
            0.0
        }
    };
    share(used.slots, capacity.slots)
        .max(share(used.bytes, capacity.bytes))
        .max(share(used.home_bytes_per_s, capacity.home_bytes_per_s))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_MS: u64 = 3_600_000;

    #[test]
    fn usage_halves_in_each_half_life() {
        let mut usage = Usage::default();
        usage.charge(1_000, 8_000);
        let later = usage.decayed(Time(2 * HOUR_MS), HOUR_MS);
        assert_eq!((later.slot_ms, later.home_bytes), (250, 2_000));
        let twice = usage.decayed(Time(HOUR_MS), HOUR_MS);
        assert_eq!(twice.decayed(Time(2 * HOUR_MS), HOUR_MS), later);
    }

    #[test]
    fn dominant_share_is_the_largest_of_three() {
        let capacity = Resources {
            slots: 10,
            bytes: 1 << 30,
            home_bytes_per_s: 1_000_000,
        };
        let mut usage = Usage::default();
        usage.charge(HOUR_MS, 0);
        let slots = usage.dominant_share(capacity, HOUR_MS);
        assert!(
            (slots - 0.1 * std::f64::consts::LN_2).abs() < 1e-9,
            "{slots}"
        );
        usage.charge_space(1 << 29, HOUR_MS);
        let space = usage.dominant_share(capacity, HOUR_MS);
        assert!(
            (space - 0.5 * std::f64::consts::LN_2).abs() < 1e-9,
            "{space}"
        );
        usage.charge(0, 3_600_000_000);
        let home = usage.dominant_share(capacity, HOUR_MS);
        assert!((home - std::f64::consts::LN_2).abs() < 1e-9, "{home}");
    }

    #[test]
    fn constant_use_of_half_converges_to_half() {
        let capacity = Resources {
            slots: 4,
            bytes: 0,
            home_bytes_per_s: 0,
        };
        let mut usage = Usage::default();
        for minute in 1..60 * 24 {
            usage = usage.decayed(Time(minute * 60_000), HOUR_MS);
            usage.charge(2 * 60_000, 0);
        }
        let share = usage.dominant_share(capacity, HOUR_MS);
        assert!((share - 0.5).abs() < 0.01, "{share}");
    }
}
