//! Figures in the text form that Prometheus reads (OpenMetrics). The only user of the library for
//! it; knows nothing of HTTP.

use std::collections::BTreeMap;
use std::fmt;

use bafs_server::counters::Metrics;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::{CALLS_PREFIX, metric_help};

/// First part of every name.
const NAME_PREFIX: &str = "bafs";

/// The page.
pub(super) fn render_page(figures: &Metrics) -> String {
    let mut registry = Registry::with_prefix(NAME_PREFIX);
    registry.register_collector(Box::new(FiguresCollector(figures.clone())));
    let mut page = String::new();
    // Writing to a string does not fail.
    let _ = text::encode(&mut page, &registry);
    page
}

/// Letters, digits and underscores, as Prometheus demands.
pub(super) fn sanitize_name(name: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    name.chars().map(allowed).collect()
}

/// Figures of one moment.
#[derive(Debug)]
struct FiguresCollector(Metrics);

impl Collector for FiguresCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut calls = BTreeMap::new();
        for (counted, value) in &self.0.counters {
            if let Some(call) = counted.strip_prefix(CALLS_PREFIX) {
                calls.insert(call, *value);
                continue;
            }
            let (name, kind) = (sanitize_name(counted), MetricType::Counter);
            let told = encoder.encode_descriptor(&name, metric_help(counted), None, kind)?;
            ConstCounter::new(*value).encode(told)?;
        }
        if !calls.is_empty() {
            let (name, kind) = ("calls", MetricType::Counter);
            let mut told = encoder.encode_descriptor(name, metric_help(name), None, kind)?;
            for (call, value) in calls {
                let labels = [("call", call)];
                ConstCounter::new(value).encode(told.encode_family(&labels)?)?;
            }
        }
        for (counted, value) in &self.0.gauges {
            let (name, kind) = (sanitize_name(counted), MetricType::Gauge);
            let told = encoder.encode_descriptor(&name, metric_help(counted), None, kind)?;
            let value = i64::try_from(*value).unwrap_or(i64::MAX);
            ConstGauge::new(value).encode(told)?;
        }
        Ok(())
    }
}
