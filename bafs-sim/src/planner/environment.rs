//! The machines a workload is planned for, read from TOML: the only user of the `toml` crate in
//! this crate. It does not read files and does not ask a live catalog.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bafs_workflow::{QuantityError, parse_duration_with_unit, parse_rate, parse_size};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::shape::Shape;

/// Nodes in one environment; more is a typing error.
const NODES_MAX: u64 = 1_000_000;
/// Bytes that all nodes offer together: sums of volumes fit a u64.
const STORAGE_BYTES_MAX: u128 = 8_000_000_000_000_000_000;
/// Processors of one node; more is a typing error.
const CPUS_MAX: u32 = 65_536;
/// The speed that run times are declared for, in thousandths.
const SPEED_PERMILLE_DEFAULT: u32 = 1000;
/// A node a thousand times as fast as others, or as slow, is a typing error.
const SPEED_RATIO_MAX: f64 = 1000.0;
/// Files that a node holds when the environment does not say: no limit to speak of.
const FILES_DEFAULT: u64 = 1 << 40;
/// How long a node that failed is away when the environment does not say, in seconds.
pub const RESTART_S_DEFAULT: u64 = 60;
/// A link on which everything arrives more than a minute late is a typing error, in microseconds.
const LATENCY_US_MAX: u64 = 60_000_000;
/// Letters of a line that an error of TOML's own shows.
const EXCERPT_CHARS_MAX: usize = 80;

/// Equal nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeClass {
    /// How many there are, at least one.
    pub count: u32,
    /// Jobs that each runs at once; 0 for a node that only stores.
    pub cpus: u32,
    /// Bytes that each offers for volumes; 0 for a node that only computes.
    pub storage_bytes: u64,
    /// Files that each holds at most.
    pub files: u64,
    /// The cluster that they are in; nodes of one cluster share caches and a link to home.
    pub cluster: String,
    /// How fast they compute, in thousandths of the speed that run times are declared for.
    pub speed_permille: u32,
    /// Memory of each in which volumes that were read stay, in bytes.
    pub memory_bytes: u64,
    /// Rate of each one's link in bytes per second, where it is not that of the environment.
    pub local_bytes_per_s: Option<u64>,
    /// Rate of each one's disk in bytes per second, where it is not that of its link.
    pub disk_bytes_per_s: Option<u64>,
    /// Rate of the link to home of their cluster in bytes per second, where it is not that of the
    /// environment; the same for all nodes of a cluster.
    pub home_bytes_per_s: Option<u64>,
    /// Latency of that link, in microseconds; the same for all nodes of a cluster.
    pub home_latency_us: u64,
    /// After a rest, the bytes of up to so many microseconds of rest cross the link at once, as
    /// with a token bucket; the same for all nodes of a cluster.
    pub home_burst_us: u64,
    /// Latency of their own links, in microseconds.
    pub local_latency_us: u64,
    /// Whether hashing distributes the blocks of caches over them, so that shares differ; otherwise
    /// each gets exactly its share.
    pub has_hash_imbalance: bool,
    /// Rate of each one's memory in bytes per second. Where it is given, readers wait for each
    /// block, so the times of memory, disk and links add up; else they read ahead.
    pub memory_bytes_per_s: Option<u64>,
    /// Time of arrival, in seconds; plans count only nodes with 0.
    pub arrival_s: u64,
    /// Time of permanent departure, in seconds; `None` if they stay.
    pub departure_s: Option<u64>,
}

impl NodeClass {
    /// `count` nodes of the only cluster, of usual speed, with the links of the environment.
    pub fn new(count: u32, cpus: u32, storage_bytes: u64) -> Self {
        Self {
            count,
            cpus,
            storage_bytes,
            files: FILES_DEFAULT,
            cluster: "default".to_owned(),
            speed_permille: SPEED_PERMILLE_DEFAULT,
            memory_bytes: 0,
            local_bytes_per_s: None,
            disk_bytes_per_s: None,
            home_bytes_per_s: None,
            home_latency_us: 0,
            home_burst_us: 0,
            local_latency_us: 0,
            has_hash_imbalance: false,
            memory_bytes_per_s: None,
            arrival_s: 0,
            departure_s: None,
        }
    }

    /// Whether they are present at the start.
    pub fn is_present_at_start(&self) -> bool {
        self.arrival_s == 0
    }
}

/// The nodes and links for a workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// The nodes, in the order of the file; at least one processor altogether.
    pub nodes: Vec<NodeClass>,
    /// Rate of the link to home, both directions and all nodes of a cluster together; at least 1.
    /// Each cluster has a link of its own.
    pub home_bytes_per_s: u64,
    /// Rate of one node's link inside the cluster; at least 1.
    pub local_bytes_per_s: u64,
    /// Mean time between failures of any of the nodes in seconds; none fail when it is not given.
    pub mtbf_s: Option<u64>,
    /// How long a node that failed is away; it returns empty.
    pub restart_s: u64,
}

/// Why a text is no environment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}", .line.map_or_else(String::new, |line| format!("line {line}: ")))]
pub struct EnvironmentError {
    /// The line, from 1 on; none where something is missing, or the whole is too much.
    pub line: Option<usize>,
    /// The error and, if useful, a remedy.
    pub message: String,
}

type TomlTable = BTreeMap<Spanned<String>, Spanned<toml::Value>>;

impl Environment {
    /// Bytes of an environment file.
    pub const FILE_BYTES_MAX: usize = 1 << 20;

    /// Reads an environment:
    ///
    /// ```toml
    /// home-rate = "1 MB/s"      # the link to home
    /// local-rate = "12 MB/s"    # each node's link
    /// mtbf = "12 h"             # optional, as is restart = "60 s"
    /// [[nodes]]
    /// count = 50
    /// cpus = 1
    /// storage = "5 GB"
    /// ```
    pub fn parse(text: &str) -> Result<Self, EnvironmentError> {
        if text.len() > Self::FILE_BYTES_MAX {
            return Err(global_error("an environment file has at most 1 MiB"));
        }
        let table: TomlTable = toml::from_str(text).map_err(|e| syntax_error(text, &e))?;
        let mut environment = Self {
            nodes: Vec::new(),
            home_bytes_per_s: 0,
            local_bytes_per_s: 0,
            mtbf_s: None,
            restart_s: RESTART_S_DEFAULT,
        };
        let (mut usual, mut has_nodes) = (NodeClass::new(1, 0, 0), false);
        for (key, value) in &table {
            let place = KeyPosition {
                text,
                offset: key.span().start,
                key: key.get_ref().as_str(),
            };
            match place.key {
                "home-rate" => environment.home_bytes_per_s = place.rate(value.get_ref())?,
                "local-rate" => environment.local_bytes_per_s = place.rate(value.get_ref())?,
                "mtbf" => environment.mtbf_s = Some(place.duration(value.get_ref())?),
                "restart" => environment.restart_s = place.duration(value.get_ref())?,
                "home-latency" => usual.home_latency_us = place.latency(value.get_ref())?,
                "home-burst" => usual.home_burst_us = place.latency(value.get_ref())?,
                "local-latency" => usual.local_latency_us = place.latency(value.get_ref())?,
                "hash-imbalance" | "hash-skew" => {
                    usual.has_hash_imbalance = place.flag(value.get_ref())?
                }
                "nodes" => has_nodes = true,
                _ => {
                    return Err(place.error(
                        "is an unknown key; the keys are home-rate, local-rate, home-latency, \
                         home-burst, local-latency, hash-imbalance, mtbf, restart and [[nodes]]",
                    ));
                }
            }
        }
        if has_nodes {
            environment.nodes = parse_nodes(text, &usual)?;
        }
        environment.validate()
    }

    /// The same with other rates of links, of all nodes and clusters alike.
    #[must_use]
    pub fn with_rates(mut self, home: Option<u64>, local: Option<u64>) -> Self {
        self.home_bytes_per_s = home.unwrap_or(self.home_bytes_per_s);
        self.local_bytes_per_s = local.unwrap_or(self.local_bytes_per_s);
        for class in &mut self.nodes {
            class.home_bytes_per_s = class.home_bytes_per_s.filter(|_| home.is_none());
            class.local_bytes_per_s = class.local_bytes_per_s.filter(|_| local.is_none());
        }
        self
    }

    /// Checks a changed environment by the rules of [`Self::parse`].
    ///
    /// # Errors
    /// The missing, zero or excessive value, without a line.
    pub fn validate(self) -> Result<Self, EnvironmentError> {
        if self.home_bytes_per_s == 0 {
            return Err(global_error(
                "home-rate is missing; write home-rate = \"1 MB/s\"",
            ));
        }
        if self.local_bytes_per_s == 0 {
            return Err(global_error(
                "local-rate is missing; write local-rate = \"12 MB/s\"",
            ));
        }
        if self.nodes.is_empty() {
            return Err(global_error(
                "there are no nodes; write a [[nodes]] section",
            ));
        }
        let all: u64 = self.nodes.iter().map(|class| u64::from(class.count)).sum();
        if all > NODES_MAX {
            let message = format!("{all} nodes are too many; the limit is {NODES_MAX}");
            return Err(global_error(message));
        }
        let of = |class: &NodeClass| u128::from(class.count) * u128::from(class.storage_bytes);
        if self.nodes.iter().map(of).sum::<u128>() > STORAGE_BYTES_MAX {
            return Err(global_error(
                "the storage of all nodes is larger than 8000 PB, the limit",
            ));
        }
        if self.initial_nodes().next().is_none() {
            return Err(global_error(
                "no node exists at the start, so no job could run; remove `from` from at least one \
                 [[nodes]] section",
            ));
        }
        if self.cpus() == 0 {
            return Err(global_error(
                "no node has a processor at the start, so no job could run; raise `cpus`",
            ));
        }
        Ok(self)
    }

    /// Processors and bytes of the nodes that are present at once, in the order of their arrivals
    /// and departures.
    pub(super) fn node_totals(&self) -> Vec<(u64, u128)> {
        let mut changes: BTreeMap<u64, (i128, i128)> = BTreeMap::new();
        for class in &self.nodes {
            let cpus = i128::from(class.count) * i128::from(class.cpus);
            let bytes = i128::from(class.count) * i128::from(class.storage_bytes);
            for (at, sign) in [(Some(class.arrival_s), 1), (class.departure_s, -1)] {
                if let Some(at) = at {
                    let change = changes.entry(at).or_default();
                    *change = (change.0 + sign * cpus, change.1 + sign * bytes);
                }
            }
        }
        let sums = changes.values().scan((0, 0), |there, change| {
            *there = (there.0 + change.0, there.1 + change.1);
            Some((there.0 as u64, there.1 as u128))
        });
        sums.filter(|there| there.0 > 0).collect()
    }

    /// Jobs that all nodes together run at once.
    pub fn cpus(&self) -> u64 {
        self.sum_initial(|class| u64::from(class.cpus))
    }

    /// How many jobs of this shape run at once, if their data do not hinder them; they keep
    /// processors as a mean one does.
    pub(super) fn concurrent_jobs(&self, shape: &Shape) -> u64 {
        let jobs = self.cpus() as f64 / shape.cpus.max(1.0);
        (jobs as u64).max(self.cpus().min(1))
    }

    /// Processors of the nodes on which jobs with so many processors fit.
    pub(super) fn usable_cpus(&self, cpus: u32) -> u64 {
        self.sum_initial(|class| match class.cpus >= cpus {
            true => u64::from(class.cpus),
            false => 0,
        })
    }

    /// The environment for jobs of this shape: nodes on which no job fits do not compute, and if
    /// all jobs need the same number of processors, remaining ones do not count. As it is when none
    /// fits anywhere.
    pub(super) fn usable_nodes(&self, shape: &Shape) -> Cow<'_, Self> {
        let (widest, narrowest) = shape.cpus_range();
        let used = |class: &NodeClass| match class.cpus >= narrowest {
            true if widest == narrowest => class.cpus - class.cpus % widest.max(1),
            true => class.cpus,
            false => 0,
        };
        let is_used_whole = |class: &NodeClass| used(class) == class.cpus;
        if self.nodes.iter().all(is_used_whole) || self.usable_cpus(narrowest) == 0 {
            return Cow::Borrowed(self);
        }
        let mut able = self.clone();
        for class in &mut able.nodes {
            class.cpus = used(class);
        }
        Cow::Owned(able)
    }

    /// Bytes that all nodes together offer for volumes.
    pub fn storage_bytes(&self) -> u128 {
        let of = |class: &NodeClass| u128::from(class.count) * u128::from(class.storage_bytes);
        self.initial_nodes().map(of).sum()
    }

    /// Bytes of the node that offers most.
    pub fn largest_node_bytes(&self) -> u64 {
        self.initial_nodes()
            .map(|class| class.storage_bytes)
            .max()
            .unwrap_or(0)
    }

    /// All nodes.
    pub fn node_count(&self) -> u64 {
        self.sum_initial(|_| 1)
    }

    /// Nodes that run jobs.
    pub fn computing_nodes(&self) -> u64 {
        self.sum_initial(|class| u64::from(class.cpus > 0))
    }

    /// Nodes that hold volumes.
    pub fn storing_nodes(&self) -> u64 {
        self.sum_initial(|class| u64::from(class.storage_bytes > 0))
    }

    /// Whether the equations describe these nodes: one cluster, always present, with nodes that
    /// differ only in processors and storage, and links with rates alone.
    pub fn is_uniform(&self) -> bool {
        let Some(first) = self.nodes.first() else {
            return true;
        };
        self.nodes.iter().all(|class| {
            let expected = NodeClass {
                cluster: first.cluster.clone(),
                files: class.files,
                memory_bytes: class.memory_bytes,
                ..NodeClass::new(class.count, class.cpus, class.storage_bytes)
            };
            *class == expected
        })
    }

    fn sum_initial(&self, of: impl Fn(&NodeClass) -> u64) -> u64 {
        self.initial_nodes()
            .map(|class| u64::from(class.count) * of(class))
            .sum()
    }

    /// Whether the nodes at the start belong to several clusters.
    pub(super) fn has_clusters(&self) -> bool {
        let mut clusters = self.initial_nodes().map(|class| &class.cluster);
        let first = clusters.next();
        clusters.any(|cluster| Some(cluster) != first)
    }

    /// The nodes at the start.
    pub(super) fn initial_nodes(&self) -> impl Iterator<Item = &NodeClass> {
        self.nodes
            .iter()
            .filter(|class| class.is_present_at_start())
    }
}

/// `[[nodes]]` again, with places inside.
#[derive(Deserialize)]
struct NodeTables {
    nodes: Vec<Spanned<TomlTable>>,
}

/// Reads all sections; a missing key has the value of `usual`.
fn parse_nodes(text: &str, usual: &NodeClass) -> Result<Vec<NodeClass>, EnvironmentError> {
    let tables: NodeTables = toml::from_str(text).map_err(|e| syntax_error(text, &e))?;
    let mut nodes: Vec<NodeClass> = Vec::with_capacity(tables.nodes.len());
    let mut homes: BTreeMap<String, (Option<u64>, u64, u64)> = BTreeMap::new();
    for table in &tables.nodes {
        let class = parse_node_class(text, table, usual)?;
        let (rate, latency) = (class.home_bytes_per_s, class.home_latency_us);
        let home = (rate, latency, class.home_burst_us);
        if *homes.entry(class.cluster.clone()).or_insert(home) != home {
            let message = format!(
                "cluster '{}' has one link to home: give all its [[nodes]] the same home-rate, \
                 home-latency and home-burst, or another `cluster`",
                class.cluster
            );
            return Err(error_at_line(
                line_number(text, table.span().start),
                message,
            ));
        }
        nodes.push(class);
    }
    Ok(nodes)
}

fn parse_node_class(
    text: &str,
    table: &Spanned<TomlTable>,
    usual: &NodeClass,
) -> Result<NodeClass, EnvironmentError> {
    let (mut count, mut cpus, mut storage_bytes) = (None, None, None);
    let mut class = usual.clone();
    let mut until = None;
    for (key, value) in table.get_ref() {
        let place = KeyPosition {
            text,
            offset: key.span().start,
            key: key.get_ref().as_str(),
        };
        let value = value.get_ref();
        match place.key {
            "count" => count = Some(place.number(value, 1, NODES_MAX as u32)?),
            "cpus" => cpus = Some(place.number(value, 0, CPUS_MAX)?),
            "storage" => storage_bytes = Some(place.size(value)?),
            "files" => class.files = place.number(value, 1, u32::MAX)?.into(),
            "cluster" => class.cluster = place.name(value)?,
            "speed" => class.speed_permille = place.speed(value)?,
            "memory" => class.memory_bytes = place.size(value)?,
            "local-rate" => class.local_bytes_per_s = Some(place.rate(value)?),
            "disk-rate" => class.disk_bytes_per_s = Some(place.rate(value)?),
            "home-rate" => class.home_bytes_per_s = Some(place.rate(value)?),
            "home-latency" => class.home_latency_us = place.latency(value)?,
            "home-burst" => class.home_burst_us = place.latency(value)?,
            "local-latency" => class.local_latency_us = place.latency(value)?,
            "memory-rate" => class.memory_bytes_per_s = Some(place.rate(value)?),
            "from" => class.arrival_s = place.time(value)?,
            "until" => {
                class.departure_s = Some(place.time(value)?);
                until = Some(place);
            }
            _ => {
                return Err(place.error(
                    "is an unknown key of [[nodes]]; count, cpus and storage are required; files, \
                     cluster, speed, memory, memory-rate, home-rate, home-latency, home-burst, \
                     local-rate, local-latency, disk-rate, from and until are optional",
                ));
            }
        }
    }
    let missing = |key: &str| {
        let message = format!("this [[nodes]] section has no `{key}`");
        error_at_line(line_number(text, table.span().start), message)
    };
    if let (Some(until), Some(until_s)) = (until, class.departure_s)
        && until_s <= class.arrival_s
    {
        return Err(until.error("is not after `from`, so these nodes would never exist"));
    }
    class.count = count.ok_or_else(|| missing("count"))?;
    class.cpus = cpus.ok_or_else(|| missing("cpus"))?;
    class.storage_bytes = storage_bytes.ok_or_else(|| missing("storage"))?;
    Ok(class)
}

/// Position of a value. Lines are counted only for errors, because a file may have many keys.
struct KeyPosition<'t> {
    text: &'t str,
    offset: usize,
    key: &'t str,
}

impl KeyPosition<'_> {
    fn error(&self, what: &str) -> EnvironmentError {
        let line = line_number(self.text, self.offset);
        error_at_line(line, format!("`{}` {what}", self.key))
    }

    fn text<'v>(&self, value: &'v toml::Value, example: &str) -> Result<&'v str, EnvironmentError> {
        let wrong = || self.error(&format!("must be text with a unit, such as \"{example}\""));
        value.as_str().ok_or_else(wrong)
    }

    fn name(&self, value: &toml::Value) -> Result<String, EnvironmentError> {
        let name = value.as_str().filter(|name| !name.trim().is_empty());
        let wrong = || self.error("must be a name, such as \"a\"");
        name.map(str::to_owned).ok_or_else(wrong)
    }

    fn read(&self, result: Result<u64, QuantityError>) -> Result<u64, EnvironmentError> {
        result.map_err(|e| self.error(&format!("is invalid: {e}")))
    }

    fn size(&self, value: &toml::Value) -> Result<u64, EnvironmentError> {
        self.read(parse_size(self.text(value, "250 GB")?))
    }

    fn rate(&self, value: &toml::Value) -> Result<u64, EnvironmentError> {
        let text = self.text(value, "1 MB/s")?;
        if !text.trim().ends_with("/s") {
            return Err(self.error("must be a rate, such as \"1 MB/s\""));
        }
        self.read(parse_rate(text))
    }

    /// Since the beginning, which is a time as well.
    fn time(&self, value: &toml::Value) -> Result<u64, EnvironmentError> {
        self.read(parse_duration_with_unit(self.text(value, "12 h")?))
    }

    fn duration(&self, value: &toml::Value) -> Result<u64, EnvironmentError> {
        match self.time(value)? {
            0 => Err(self.error("must not be zero")),
            seconds => Ok(seconds),
        }
    }

    /// A delay, in microseconds.
    fn latency(&self, value: &toml::Value) -> Result<u64, EnvironmentError> {
        let text = self.text(value, "20 ms")?.trim();
        let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
        let us = match unit.trim() {
            "us" => 1,
            "ms" => 1_000,
            "s" => 1_000_000,
            _ => return Err(self.error("must be a whole number of us, ms or s, such as \"20 ms\"")),
        };
        let number = &text[..text.len() - unit.len()];
        if number.is_empty() {
            return Err(self.error("must be a number with a unit, such as \"20 ms\""));
        }
        let latency_us = number.parse::<u64>().ok().and_then(|n| n.checked_mul(us));
        let sane = latency_us.filter(|latency_us| *latency_us <= LATENCY_US_MAX);
        let too_long = || self.error("is too long: the limit is 60 s");
        sane.ok_or_else(too_long)
    }

    fn flag(&self, value: &toml::Value) -> Result<bool, EnvironmentError> {
        let flag = value.as_bool();
        flag.ok_or_else(|| self.error("must be true or false"))
    }

    /// A speed relative to the usual one, in thousandths.
    fn speed(&self, value: &toml::Value) -> Result<u32, EnvironmentError> {
        let number = value
            .as_float()
            .or_else(|| value.as_integer().map(|n| n as f64));
        let sane = number.filter(|n| (1.0 / SPEED_RATIO_MAX..=SPEED_RATIO_MAX).contains(n));
        match sane {
            Some(ratio) => Ok((ratio * f64::from(SPEED_PERMILLE_DEFAULT)).round() as u32),
            None => Err(self.error("must be a number from 0.001 to 1000, such as 1.5")),
        }
    }

    fn number(&self, value: &toml::Value, least: u32, most: u32) -> Result<u32, EnvironmentError> {
        let number = value
            .as_integer()
            .and_then(|number| u32::try_from(number).ok());
        match number.filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(number),
            None => Err(self.error(&format!("must be a whole number from {least} to {most}"))),
        }
    }
}

fn error_at_line(line: usize, message: impl Into<String>) -> EnvironmentError {
    EnvironmentError {
        line: Some(line),
        ..global_error(message)
    }
}

/// An error without a line.
fn global_error(message: impl Into<String>) -> EnvironmentError {
    EnvironmentError {
        line: None,
        message: message.into(),
    }
}

/// Errors of TOML's own often name no key: the line is shown.
fn syntax_error(text: &str, error: &toml::de::Error) -> EnvironmentError {
    let Some(span) = error.span() else {
        return global_error(error.message());
    };
    let line = line_number(text, span.start);
    let shown = text.lines().nth(line - 1).unwrap_or("").trim();
    let shown: String = shown.chars().take(EXCERPT_CHARS_MAX).collect();
    let message = match error.message() {
        // TOML's own name for a number that does not fit into 64 bits.
        it if it.contains("i128") || it.contains("u128") => "a number is too large",
        it if it.contains("expected a sequence") => "nodes are given in sections [[nodes]]",
        it => it,
    };
    error_at_line(line, format!("{message}, in `{shown}`"))
}

fn line_number(text: &str, offset: usize) -> usize {
    let offset = offset.min(text.len());
    text.as_bytes()[..offset]
        .iter()
        .filter(|&&byte| byte == b'\n')
        .count()
        + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rejection_cases::assert_each_is_rejected;

    const THESIS_TEXT: &str = "home-rate = \"1 MB/s\"\nlocal-rate = \"12 MB/s\"\n\n[[nodes]]\n\
                          count = 50\ncpus = 1\nstorage = \"5 GB\"\n";

    #[test]
    fn thesis_environment_is_parsed() {
        let environment = Environment::parse(THESIS_TEXT).unwrap();
        assert_eq!(environment.cpus(), 50);
        assert_eq!(environment.storage_bytes(), 250_000_000_000);
        assert_eq!(
            (environment.home_bytes_per_s, environment.local_bytes_per_s),
            (1_000_000, 12_000_000)
        );
        assert_eq!(environment.mtbf_s, None);
        let failing_text = format!("mtbf = \"12 h\"\n{THESIS_TEXT}");
        assert_eq!(
            Environment::parse(&failing_text).unwrap().mtbf_s,
            Some(43_200)
        );
    }

    #[test]
    fn global_settings_are_defaults_for_all_nodes() {
        let own = "cluster = \"b\"\nhome-rate = \"9 MB/s\"\nhome-latency = \"1 s\"\n";
        let other = format!("[[nodes]]\ncount = 1\ncpus = 1\nstorage = \"5 GB\"\n{own}");
        let text = format!("home-latency = \"20 ms\"\nhash-skew = true\n{THESIS_TEXT}{other}");
        let nodes = Environment::parse(&text).unwrap().nodes;
        let home = |at: usize| (nodes[at].home_bytes_per_s, nodes[at].home_latency_us);
        assert_eq!(home(0), (None, 20_000));
        assert_eq!(home(1), (Some(9_000_000), 1_000_000));
        assert!(nodes[0].has_hash_imbalance && nodes[1].has_hash_imbalance);
    }

    #[test]
    fn overriding_rates_apply_to_all_nodes() {
        let own = "home-rate = \"9 MB/s\"\nlocal-rate = \"7 MB/s\"\n";
        let environment = Environment::parse(&format!("{THESIS_TEXT}{own}")).unwrap();
        let usual = Environment::parse(THESIS_TEXT).unwrap();
        assert_eq!(
            environment.clone().with_rates(None, None),
            environment,
            "nothing is changed"
        );
        let (home, local) = (usual.home_bytes_per_s, usual.local_bytes_per_s);
        assert_eq!(
            environment.clone().with_rates(Some(home), Some(local)),
            usual
        );
        let class = &environment.with_rates(Some(home), None).nodes[0];
        let rates = (class.home_bytes_per_s, class.local_bytes_per_s);
        assert_eq!(rates, (None, Some(7_000_000)));
    }

    #[test]
    fn node_arriving_at_zero_is_accepted() {
        let text = THESIS_TEXT.replace("cpus = 1", "cpus = 1\nfrom = \"0 s\"");
        assert_eq!(Environment::parse(&text).unwrap().cpus(), 50);
    }

    #[test]
    fn only_equal_permanent_nodes_count_as_even() {
        let is_even = |more: &str| {
            let other = "[[nodes]]\ncount = 1\ncpus = 4\nstorage = \"9 GB\"\n";
            let text = format!("{THESIS_TEXT}{other}{more}");
            Environment::parse(&text).unwrap().is_uniform()
        };
        assert!(is_even("") && is_even("memory = \"9 GB\""));
        for uneven in [
            "cluster = \"b\"",
            "speed = 2",
            "local-rate = \"1 MB/s\"",
            "disk-rate = \"1 MB/s\"",
            "until = \"2 h\"",
            "from = \"2 h\"",
            "local-latency = \"1 ms\"",
        ] {
            assert!(!is_even(uneven), "{uneven}");
        }
    }

    #[test]
    fn absurd_values_are_errors_with_line_and_key() {
        let slips = r#"
            "1 MB/s" => "0 MB/s" => line 1: => `home-rate` is invalid: the rate '0 MB/s' is zero
            "1 MB/s" => "-1 MB/s" => line 1: => `home-rate` is invalid
            "1 MB/s" => "1 MB" => line 1: => `home-rate` must be a rate
            "1 MB/s" => 1000000 => line 1: => `home-rate` must be text
            "1 MB/s" => "1 Mbit/s" => line 1: => '1 Mbit' may be bits
            "1 MB/s" => "1 Mb/s" => line 1: => `home-rate` => '1 Mb' may be bits
            "5 GB" => "5 Gb" => line 7: => `storage` => '5 Gb' may be bits
            "12 MB/s" => "12/s" => line 2: => has no unit
            local-rate = "12 MB/s" =>  => local-rate is missing
            home-rate = "1 MB/s" =>  => home-rate is missing
            local-rate => lan-rate => line 2: => `lan-rate` is an unknown key
            [[nodes]] => mtbf = "0 s"\n[[nodes]] => line 4: => `mtbf` must not be zero
            [[nodes]] => mtbf = "5 weeks"\n[[nodes]] => line 4: => unknown unit of time
            [[nodes]] => [nodes] => line 4: nodes are given in sections [[nodes]], in `[nodes]`
            count = 50 => count = 99999999999999999999 => line 5: a number is too large, in
            count = 50 => count = 0 => line 5: => `count` must be a whole number from 1
            count = 50 => count = -3 => line 5: => `count` must be
            cpus = 1 => cpus = 1.5 => line 6: => `cpus` must be
            cpus = 1 => cpus = 0 => no node has a processor
            cpus = 1 =>  => line 4: => this [[nodes]] section has no `cpus`
            cpus = 1 => cpu = 1 => line 6: => `cpu` is an unknown key of [[nodes]]
            "5 GB" => "5 G" => line 7: => unknown unit of size 'G'
            "5 GB" => "-5 GB" => line 7: => `storage` is invalid
            count = 50 => count = 50\ncount = 51 => line 6: => duplicate key => in `count = 51`
            count = 50 => count = 99999999999999999999 => line 5: => in `count = 9999999999
            count = 50 => count =  => line 5:
        "#;
        assert_each_is_rejected(THESIS_TEXT, slips, Environment::parse);
    }

    #[test]
    fn absurd_nodes_are_errors_with_line_and_key() {
        let slips = r#"
            cpus = 1 => cpus = 1\nspeed = 0 => line 7: => `speed` must be a number
            cpus = 1 => cpus = 1\ndisk-rate = "0 B/s" => line 7: => `disk-rate` => is zero
            cpus = 1 => cpus = 1\nuntil = "2 h"\nfrom = "2 h" => line 7: => is not after `from`
            cpus = 1 => cpus = 1\nfrom = "2 h" => no node exists at the start
            cpus = 1 => cpus = 1\nmemory-rate = "9" => line 7: => `memory-rate` must be a rate
            cpus = 1 => cpus = 1\nhome-rate = "0 B/s" => line 7: => `home-rate` => is zero
            cpus = 1 => cpus = 1\ncluster = "" => line 7: => `cluster` must be a name
            cpus = 1 => cpus = 1\nhome-latency = "1" => line 7: => must be a whole number of us, ms
            cpus = 1 => cpus = 1\nhome-latency = "ms" => line 7: => must be a number
            cpus = 1 => cpus = 1\nlocal-latency = "61 s" => line 7: => the limit is 60 s
            cpus = 1 => cpus = 1\nhome-latency = "99999999999999999999 s" => line 7: => is too long
            cpus = 1 => cpus = 1\nlocal-latency = "-1 ms" => line 7: => must be a whole number
            [[nodes]] => hash-imbalance = 1\n[[nodes]] => line 4: => hash-imbalance => true or false
            cpus = 1 => cpus = 1\nmemory = 5 => line 7: => `memory` must be text
            count = 50 => count = 5000000000 => line 5: => `count` must be
            5 GB => 1000 PB => larger than 8000 PB
            [[nodes]] => [nodes] => line 4:
            [[nodes]] => restart = "0 s"\n[[nodes]] => line 4: => `restart` must not be zero
        "#;
        assert_each_is_rejected(THESIS_TEXT, slips, Environment::parse);
        let other = "[[nodes]]\ncount = 1\ncpus = 1\nstorage = \"5 GB\"\nhome-rate = \"2 MB/s\"\n";
        let error = Environment::parse(&format!("{THESIS_TEXT}{other}")).unwrap_err();
        assert_eq!(error.line, Some(8), "{error}");
        assert!(error.message.contains("has one link to home"), "{error}");
        let no_processor = Environment::parse(&THESIS_TEXT.replace("cpus = 1", "cpus = 0"));
        let error = no_processor.unwrap_err();
        assert_eq!(error.line, None, "{error}: its line 1 is right");
        let empty = Environment::parse("home-rate = \"1 B/s\"\nlocal-rate = \"1 B/s\"");
        let error = empty.unwrap_err();
        assert!(error.message.contains("no nodes"), "{error}");
    }
}
