//! The machines of a cluster that is there, for the planner: nodes as the catalog lists them, rates
//! of links as they are declared or as a run that is over found them. It reserves nothing.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use bafs_proto::message::{Advert, ServerKind};
use bafs_sched::Settings;
use bafs_sched::io::journal;
use bafs_sim::past_runs;
use bafs_sim::planner::{Environment, NodeClass, RESTART_S_DEFAULT};

use crate::args::{LearnedArgs, PlanArgs};
use crate::client::ClusterClient;
use crate::history;
use crate::learned;
use crate::units::parse_rate;

/// Bytes per second of the link to home, and of each node's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct LinkRates {
    pub(crate) home: Option<u64>,
    pub(crate) local: Option<u64>,
}

impl LinkRates {
    /// Those that `--home-rate` and `--local-rate` declare.
    pub(crate) fn parse_rates(home: &Option<String>, local: &Option<String>) -> Result<Self> {
        let rate = |text: &Option<String>, name: &str| {
            let text = text.as_deref();
            let rate = text.map(|text| parse_rate(text).with_context(|| format!("--{name}")));
            rate.transpose()
        };
        Ok(Self {
            home: rate(home, "home-rate")?,
            local: rate(local, "local-rate")?,
        })
    }

    /// These, else those that runs have taught.
    pub(crate) fn or_learned(self, learned: &LearnedArgs, catalog: &str) -> Self {
        if self.home.is_some() && self.local.is_some() {
            return self;
        }
        let store = learned::find_store(learned);
        let known = store.map_or_else(Self::default, |store| store.link_rates(catalog));
        Self {
            home: self.home.or(known.home),
            local: self.local.or(known.local),
        }
    }

    /// The declared ones, else those that a run measured.
    fn or_from_run(self, args: &PlanArgs) -> Result<Self> {
        let Some(run) = &args.rates_from else {
            return Ok(self);
        };
        let path = history::find_journal(run)?;
        let past = past_runs::from_journal(journal::read_history(&path)?);
        let site = past.with_context(|| path.display().to_string())?.site;
        Ok(Self {
            home: self.home.or_else(|| site.as_ref()?.home_bytes_per_s),
            local: self.local.or_else(|| site.as_ref()?.local_bytes_per_s),
        })
    }
}

/// The nodes that the catalog lists, with what is free on them now.
pub(crate) async fn load_environment(args: &PlanArgs) -> Result<Environment> {
    let (Some(identity), Some(catalog)) = (&args.identity, &args.catalog) else {
        bail!(
            "no environment is given; give --environment FILE, or --identity DIR and --catalog \
             HOST:PORT for the nodes of a live cluster"
        );
    };
    let rates = LinkRates::parse_rates(&args.home_rate, &args.local_rate)?.or_from_run(args)?;
    let rates = rates.or_learned(&args.learned, catalog);
    let (Some(home), Some(local)) = (rates.home, rates.local) else {
        bail!(
            "the catalog does not know link rates, and no run has taught them yet; give \
             --home-rate and --local-rate, or an ended run of this cluster with --rates-from"
        );
    };
    find_nodes(identity, catalog, home, local).await
}

/// The nodes that the catalog lists, with links of these rates.
pub(crate) async fn find_nodes(
    identity: &Path,
    catalog: &str,
    home: u64,
    local: u64,
) -> Result<Environment> {
    let client = ClusterClient::connect(identity, catalog)?;
    let adverts = client.list_servers(Some(ServerKind::Node)).await?;
    if adverts.is_empty() {
        bail!(
            "the catalog at {catalog} lists no node; start nodes (`bafs node`), or give \
             --environment"
        );
    }
    let environment = Environment {
        nodes: group_nodes(&adverts),
        home_bytes_per_s: home,
        local_bytes_per_s: local,
        mtbf_s: None,
        restart_s: RESTART_S_DEFAULT,
    };
    let checked = environment.validate();
    checked.map_err(|error| anyhow!("the nodes in the catalog at {catalog}: {}", error.message))
}

/// Nodes with what a run would find free on them, equal ones together.
fn group_nodes(adverts: &[Advert]) -> Vec<NodeClass> {
    let slack = u128::from(Settings::default().slack_permille);
    let mut kinds: BTreeMap<(u32, u64, u64, &str), u32> = BTreeMap::new();
    for advert in adverts {
        let kept = (u128::from(advert.capacity_bytes) * slack).div_ceil(1000) as u64;
        let bytes = advert
            .free_bytes
            .min(advert.capacity_bytes.saturating_sub(kept));
        let kind = (
            advert.slots,
            bytes,
            advert.free_files,
            advert.group.as_str(),
        );
        *kinds.entry(kind).or_default() += 1;
    }
    let class = |((slots, bytes, files, group), count): ((u32, u64, u64, &str), u32)| NodeClass {
        files,
        cluster: group.to_owned(),
        ..NodeClass::new(count, slots, bytes)
    };
    kinds.into_iter().map(class).collect()
}

/// What was planned for, in a sentence.
pub(crate) fn describe_environment(environment: &Environment) -> String {
    format!(
        "planned for the free resources of the catalog's {} nodes: {} slots, {} bytes",
        environment.node_count(),
        environment.cpus(),
        environment.storage_bytes()
    )
}
