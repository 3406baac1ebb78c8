//! What commands share that talk to a cluster: identity, connections, finding things by name.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use bafs_proto::bearer::Bearer;
use bafs_proto::identity::Identity;
use bafs_proto::ids::VolumeId;
use bafs_proto::message::{Advert, Call, ListVolumes, QueryServers, Request, Role, ServerKind};
use bafs_proto::net::channel::Dialer;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::{Resource, Right, Token};
use bafs_proto::volume::{Source, VolumeState, VolumeStatus};
use bafs_sched::workflow::{Scheme, Url};
use bafs_server::clock;

use crate::args::ClientArgs;
use crate::init;

/// Time for a command's single calls, in milliseconds.
const CALL_MS: u64 = 10_000;

/// What is given away ends with the token that it was made of: the largest time that one can name.
const NEVER: Time = Time(i64::MAX as u64);

/// A connection to a cluster with a person's rights.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    pub(crate) identity: Identity,
    pub(crate) pool: Pool,
    pub(crate) catalog: String,
    bearer: Arc<Bearer>,
}

impl Client {
    /// Connects as the command line says.
    pub(crate) fn new(args: &ClientArgs) -> Result<Self> {
        Self::with(&args.identity, &args.catalog)
    }

    /// Connects with the identities in `cluster` to the catalog at an address.
    pub(crate) fn with(cluster: &Path, catalog: &str) -> Result<Self> {
        let identity = own_identity(cluster)?;
        let pool = Pool::new(Arc::new(Dialer::new(&identity)?));
        let bearer = Bearer::new(identity.token.clone(), identity.verifier.clone());
        Ok(Self {
            identity,
            pool,
            catalog: catalog.to_owned(),
            bearer: Arc::new(bearer),
        })
    }

    /// A token for others to use, on one thing.
    pub(crate) fn give(&self, resource: Resource, rights: &[Right]) -> Result<Token> {
        Ok(self.bearer.give(resource, rights, NEVER)?)
    }

    /// A token for a node that is to read a source.
    pub(crate) fn give_source(&self, source: &Source) -> Result<Token> {
        let resource = match source {
            Source::Home { path, .. } => Resource::Home(path.clone()),
            Source::Volume { volume, .. } => Resource::Volume(*volume),
        };
        self.give(resource, &[Right::Read])
    }

    /// Makes a call that ends soon.
    pub(crate) async fn call<C: Call + Clone>(&self, address: &str, call: C) -> Result<C::Reply> {
        self.call_within(address, call, CALL_MS).await
    }

    /// Makes a call that may take `ms` milliseconds.
    pub(crate) async fn call_within<C: Call + Clone>(
        &self,
        address: &str,
        call: C,
        ms: u64,
    ) -> Result<C::Reply> {
        let request: Request = call.clone().into();
        let token = self.bearer.show(address, &request, clock::now(), ms)?;
        let deadline = Deadline::after_ms(ms);
        let asked = self.pool.call_patiently(address, &token, call, deadline);
        Ok(asked.await?)
    }

    /// Live servers of a kind, or all.
    pub(crate) async fn servers(&self, kind: Option<ServerKind>) -> Result<Vec<Advert>> {
        let query = QueryServers {
            kind,
            ..QueryServers::default()
        };
        let list = self
            .call(&self.catalog, query)
            .await
            .with_context(|| format!("cannot ask the catalog at {}", self.catalog))?;
        Ok(list.servers)
    }

    /// The node of this name or address.
    pub(crate) async fn node(&self, name: &str) -> Result<Advert> {
        one_node(self.servers(Some(ServerKind::Node)).await?, name)
    }

    /// Every volume with the node that holds it. Nodes that do not tell theirs are passed over and
    /// named in the second list, with why.
    pub(crate) async fn volumes(&self) -> Result<(Vec<(Advert, VolumeStatus)>, Vec<String>)> {
        let mut found = Vec::new();
        let mut silent = Vec::new();
        for node in self.servers(Some(ServerKind::Node)).await? {
            match self.volumes_of(&node).await {
                Ok(volumes) => found.extend(volumes.into_iter().map(|v| (node.clone(), v))),
                Err(error) => silent.push(format!("{}: {error:#}", node.name)),
            }
        }
        Ok((found, silent))
    }

    /// Every volume of a node.
    pub(crate) async fn volumes_of(&self, node: &Advert) -> Result<Vec<VolumeStatus>> {
        let (mut volumes, mut after) = (Vec::new(), None);
        loop {
            let page = self.call(&node.address, ListVolumes { after }).await?;
            volumes.extend(page.volumes);
            after = page.next;
            if after.is_none() {
                return Ok(volumes);
            }
        }
    }

    /// The volume of this id or name, and its node.
    pub(crate) async fn volume(&self, wanted: &str) -> Result<(Advert, VolumeStatus)> {
        let mut matching = self.volumes_named(wanted).await?;
        if matching.len() > 1 {
            let one = |(node, v): &(Advert, VolumeStatus)| {
                let failed = match v.state {
                    VolumeState::Failed => ", failed",
                    VolumeState::Creating | VolumeState::Ready => "",
                };
                format!("{} (on {}{failed})", v.spec.id, node.name)
            };
            let all: Vec<_> = matching.iter().map(one).collect();
            bail!(
                "several volumes are named '{wanted}'; give the id of one: {}",
                all.join(", ")
            );
        }
        matching.pop().context("a volume was found")
    }

    /// All volumes of this id or name, with their nodes: one at least.
    pub(crate) async fn volumes_named(&self, wanted: &str) -> Result<Vec<(Advert, VolumeStatus)>> {
        let (mut volumes, silent) = self.volumes().await?;
        let id = wanted.parse::<VolumeId>().ok();
        volumes.retain(|(_, v)| Some(v.spec.id) == id || v.spec.name == wanted);
        if volumes.is_empty() {
            if !silent.is_empty() {
                bail!(
                    "volume '{wanted}' is on none of the nodes that answer; not asked could be: \
                     {}; try again when they do",
                    silent.join("; ")
                );
            }
            bail!("no volume '{wanted}' on any live node; see `bafs volume list`");
        }
        Ok(volumes)
    }

    /// A home URL as the wire knows it.
    pub(crate) async fn home_source(&self, text: &str) -> Result<Source> {
        let url: Url = text.parse().map_err(|e| anyhow::anyhow!("'{text}': {e}"))?;
        if url.scheme != Scheme::Bafs {
            let (address, path) = url.foreign_place()?;
            let id = None;
            return Ok(Source::Home { address, path, id });
        }
        let path = url.path.trim_matches('/').to_owned();
        let homes = self.servers(Some(ServerKind::Home)).await;
        if url.host.contains(':') {
            let address = url.host;
            let homes = homes.unwrap_or_default().into_iter();
            let id = homes
                .filter(|home| home.address == address)
                .map(|home| home.id)
                .next();
            return Ok(Source::Home { address, path, id });
        }
        let home = named(homes?, &url.host).with_context(|| {
            format!(
                "no live home '{}'; start one with `bafs home --name {0}`",
                url.host
            )
        })?;
        Ok(Source::Home {
            address: home.address,
            path,
            id: Some(home.id),
        })
    }
}

/// The node of this name or address. Names are what their owners chose, and may be of several.
fn one_node(nodes: Vec<Advert>, wanted: &str) -> Result<Advert> {
    let known: Vec<_> = nodes.iter().map(|node| node.name.clone()).collect();
    let is_meant = |node: &Advert| node.name == wanted || node.address == wanted;
    let mut meant: Vec<Advert> = nodes.into_iter().filter(is_meant).collect();
    if let Some(at) = meant.iter().position(|node| node.address == wanted) {
        return Ok(meant.swap_remove(at));
    }
    if meant.len() > 1 {
        let addresses: Vec<_> = meant.into_iter().map(|node| node.address).collect();
        bail!(
            "several nodes are named '{wanted}': give the address of one: {}",
            addresses.join(" or ")
        );
    }
    let none = || format!("no live node '{wanted}'; live are: {}", known.join(", "));
    meant.pop().with_context(none)
}

/// The home of this name, whose letters are small in a URL.
fn named(homes: Vec<Advert>, host: &str) -> Option<Advert> {
    let is_named = |home: &Advert| home.name.eq_ignore_ascii_case(host);
    homes.into_iter().find(is_named)
}

/// The identity of the person: the scheduler's, or what `bafs grant` made, which is an agent's that
/// holds a token.
fn own_identity(cluster: &Path) -> Result<Identity> {
    match granted_identity(cluster) {
        Some(granted) => Ok(granted),
        None => init::load(cluster, Role::Scheduler),
    }
}

fn granted_identity(cluster: &Path) -> Option<Identity> {
    if init::directory_of(cluster, Role::Scheduler).exists() {
        return None;
    }
    let granted = init::load(cluster, Role::Agent).ok();
    granted.filter(|granted| granted.token != Token::none())
}

/// Whether a directory has identities of a machine only, which may be a node and asks for nothing.
pub(crate) fn is_of_a_node(cluster: &Path) -> bool {
    let has = |role| init::directory_of(cluster, role).exists();
    !has(Role::Scheduler)
        && (has(Role::Server) || has(Role::Agent))
        && granted_identity(cluster).is_none()
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::ServerId;

    use super::*;

    fn server(kind: ServerKind, name: &str, address: &str) -> Advert {
        Advert {
            id: ServerId::random(),
            kind,
            name: name.to_owned(),
            address: address.to_owned(),
            group: String::new(),
            ttl_ms: 1_000,
            capacity_bytes: 0,
            capacity_files: 0,
            free_bytes: 0,
            free_files: 0,
            slots: 0,
            jobs: 0,
            caches: Vec::new(),
        }
    }

    #[test]
    fn a_home_is_found_whatever_capitals_its_name_has() {
        let home = |name: &str| server(ServerKind::Home, name, "");
        let homes = vec![home("other"), home("MyData")];
        let url: Url = "bafs://MyData/out".parse().expect("a URL");
        let found = named(homes.clone(), &url.host).expect("it lives");
        assert_eq!(found.id, homes[1].id);
        assert!(named(homes, "my").is_none());
    }

    #[test]
    fn a_name_of_several_nodes_means_none_of_them() {
        let node = |name: &str, address: &str| server(ServerKind::Node, name, address);
        let nodes = || vec![node("n1", "a:1"), node("n2", "b:2"), node("n1", "c:3")];
        let found = |wanted: &str| {
            let found = one_node(nodes(), wanted).map(|node| node.address);
            found.map_err(|refusal| refusal.to_string())
        };
        assert_eq!(found("n2").unwrap(), "b:2");
        assert_eq!(found("c:3").unwrap(), "c:3");
        let said = found("n1").unwrap_err();
        assert!(said.contains("several nodes"), "{said}");
        assert!(said.ends_with("of one: a:1 or c:3"), "{said}");
        assert!(found("n3").unwrap_err().contains("live are: n1, n2, n1"));
    }

    #[test]
    fn a_node_is_who_has_no_identity_that_may_ask() {
        let cluster = tempfile::tempdir().expect("a directory");
        assert!(!is_of_a_node(cluster.path()), "nothing is there");
        init::create(cluster.path(), NEVER).expect("identities");
        assert!(!is_of_a_node(cluster.path()));
        let scheduler = init::directory_of(cluster.path(), Role::Scheduler);
        std::fs::rename(scheduler, cluster.path().join("elsewhere")).expect("it is there");
        assert!(is_of_a_node(cluster.path()));
    }
}
