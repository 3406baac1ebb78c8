//! What servers moved since a run began, sampled while it runs.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bafs_api::TrafficSample;
use bafs_proto::time::Time;
use bafs_server::clock;

use crate::client::ClusterClient;
use crate::traffic::{TrafficTotals, poll_servers};

/// Pause between samples at first.
const INTERVAL: Duration = Duration::from_secs(2);

/// Samples that are kept: with more, every other one goes, and the pause doubles.
const SAMPLES_MAX: usize = 1_000;

/// Samples of what servers moved. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct TrafficMeter(Arc<Mutex<Vec<Sample>>>);

#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Time,
    home_bytes: u64,
    node_bytes: u64,
}

impl TrafficMeter {
    /// Asks the servers of a cluster from now on, as long as this runtime lives.
    pub(super) fn start(client: ClusterClient) -> Self {
        let meter = Self::default();
        let samples = meter.clone();
        tokio::spawn(async move {
            let mut totals = TrafficTotals::default();
            let mut pause = INTERVAL;
            loop {
                poll_servers(&client, &mut totals).await;
                let (home_bytes, node_bytes) = totals.total_bytes();
                let at = clock::now();
                samples.add(
                    Sample {
                        at,
                        home_bytes,
                        node_bytes,
                    },
                    &mut pause,
                );
                tokio::time::sleep(pause).await;
            }
        });
        meter
    }

    fn add(&self, sample: Sample, pause: &mut Duration) {
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if samples.len() >= SAMPLES_MAX {
            let mut position = 0;
            samples.retain(|_| {
                position += 1;
                position % 2 == 1
            });
            *pause *= 2;
        }
        samples.push(sample);
    }

    pub(super) fn sample_count(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The samples, with times since a run began.
    pub(super) fn samples_since(&self, began: Time) -> Vec<TrafficSample> {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let show = |sample: &Sample| TrafficSample {
            at_ms: sample.at.ms_since(began),
            home_bytes: sample.home_bytes,
            node_bytes: sample.node_bytes,
        };
        samples.iter().map(show).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_runs_keep_fewer_samples() {
        let meter = TrafficMeter::default();
        let mut pause = INTERVAL;
        for at in 0..SAMPLES_MAX as u64 + 1 {
            let sample = Sample {
                at: Time(1_000 + at),
                home_bytes: at,
                node_bytes: 0,
            };
            meter.add(sample, &mut pause);
        }
        assert_eq!(meter.sample_count(), SAMPLES_MAX / 2 + 1);
        assert_eq!(pause, INTERVAL * 2);
        let samples = meter.samples_since(Time(1_000));
        assert_eq!((samples[0].at_ms, samples[1].at_ms), (0, 2));
    }
}
