//! How many pipelines a home can serve at once (Fig 2.7).

use serde::Serialize;

use crate::role::Role;
use crate::traffic::Traffic;

/// The thesis' rates: a wide-area link, a local network, a disk, a storage centre; in MB/s.
pub const HOME_RATES_MB: [f64; 4] = [1.0, 12.0, 40.0, 1500.0];

/// Traffic that goes to the home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Discipline {
    /// All.
    AllTraffic,
    /// All but batch data, which caches serve.
    WithoutBatch,
    /// All but pipeline data, which stay where they are made.
    WithoutPipeline,
    /// Endpoint data only.
    EndpointOnly,
}

impl Discipline {
    /// Every one, in the order of the figure.
    pub const ALL: [Self; 4] = [
        Self::AllTraffic,
        Self::WithoutBatch,
        Self::WithoutPipeline,
        Self::EndpointOnly,
    ];

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllTraffic => "all traffic",
            Self::WithoutBatch => "without batch data",
            Self::WithoutPipeline => "without pipeline data",
            Self::EndpointOnly => "endpoint data only",
        }
    }

    fn has_role(self, role: Role) -> bool {
        match role {
            Role::Endpoint => true,
            Role::Pipeline => matches!(self, Self::AllTraffic | Self::WithoutBatch),
            Role::Batch => matches!(self, Self::AllTraffic | Self::WithoutPipeline),
        }
    }
}

/// What one pipeline asks of a home, and how many pipelines each rate serves.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct HomeScaling {
    /// The traffic that goes home.
    pub discipline: Discipline,
    /// Megabytes for each second of processor time.
    pub mb_per_cpu_s: f64,
    /// Pipelines at [`HOME_RATES_MB`]; none where nothing goes home.
    pub pipelines: [Option<f64>; 4],
}

/// Computes the figure for the traffic of one pipeline and its processor time. As in the thesis, a
/// buffer overlaps all computation and traffic.
pub fn compute_home_scaling(traffic: &Traffic, cpu_s: f64) -> Vec<HomeScaling> {
    let scaling = |discipline: Discipline| {
        let roles = Role::ALL
            .into_iter()
            .filter(|role| discipline.has_role(*role));
        let bytes: u64 = roles.map(|role| traffic.role(role).traffic_bytes).sum();
        let rate = bytes as f64 / 1e6 / cpu_s.max(f64::MIN_POSITIVE);
        HomeScaling {
            discipline,
            mb_per_cpu_s: rate,
            pipelines: HOME_RATES_MB.map(|home| (bytes > 0).then(|| home / rate)),
        }
    };
    Discipline::ALL.map(scaling).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic::Volume;

    #[test]
    fn scaling_divides_home_rate_by_demand() {
        let volume = |traffic_bytes| Volume {
            traffic_bytes,
            ..Volume::default()
        };
        // CMS, Table 2.4, in 15650 s.
        let traffic = Traffic {
            roles: [
                volume(63_560_000),
                volume(12_990_000),
                volume(3_729_670_000),
            ],
            ..Traffic::default()
        };
        let scaling = compute_home_scaling(&traffic, 15_650.4);
        let at_wan: Vec<u64> = scaling
            .iter()
            .map(|it| it.pipelines[0].unwrap_or(0.0) as u64)
            .collect();
        assert_eq!(at_wan, [4, 204, 4, 246]);
    }
}
