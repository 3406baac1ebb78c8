//! What commands share that talk to a cluster: identity, connections, finding things by name.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use bafs_proto::attributes::Constraint;
use bafs_proto::bearer::Bearer;
use bafs_proto::error::ErrorClass;
use bafs_proto::identity::Identity;
use bafs_proto::ids::VolumeId;
use bafs_proto::limits::{BLOCK_BYTES_DEFAULT, IO_BYTES_MAX};
use bafs_proto::message::{
    Advert, Call, ListVolumes, QueryServers, ReadSource, Request, Role, ServerKind,
};
use bafs_proto::net::channel::Dialer;
use bafs_proto::net::pool::Pool;
use bafs_proto::source::SourceIdentity;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::{Resource, Right, Token};
use bafs_proto::volume::{VolumeSource, VolumeState, VolumeStatus};
use bafs_server::clock;
use bafs_workflow::{Scheme, Url};
use bytes::Bytes;

use crate::args::{ClientArgs, UsageError};
use crate::failure::{ClassifiedError, FailureClass};
use crate::init;

/// Time for a command's single calls, in milliseconds.
const CALL_TIMEOUT_MS: u64 = 10_000;

/// Most listings by which it is confirmed that a name is of no volume, or of several.
const CONFIRMATIONS_MAX: usize = 4;

/// What is given away ends with the token that it was made of: the largest time that one can name.
const LATEST_TIME: Time = Time(i64::MAX as u64);

/// A connection to a cluster with a person's rights.
#[derive(Debug, Clone)]
pub(crate) struct ClusterClient {
    pub(crate) identity: Identity,
    pub(crate) pool: Pool,
    pub(crate) catalog: String,
    bearer: Arc<Bearer>,
}

impl ClusterClient {
    /// Connects as the command line says.
    pub(crate) fn new(args: &ClientArgs) -> Result<Self> {
        Self::connect(&args.identity, &args.catalog)
    }

    /// Connects with the identities in `cluster` to the catalog at an address.
    pub(crate) fn connect(cluster: &Path, catalog: &str) -> Result<Self> {
        let identity = load_user_identity(cluster)?;
        let pool = Pool::new(Arc::new(Dialer::new(&identity)?));
        Ok(Self::with_pool(identity, pool, catalog))
    }

    /// Speaks by connections of this identity that others use too.
    pub(crate) fn with_pool(identity: Identity, pool: Pool, catalog: &str) -> Self {
        let bearer = Bearer::new(identity.token.clone(), identity.verifier.clone());
        Self {
            identity,
            pool,
            catalog: catalog.to_owned(),
            bearer: Arc::new(bearer),
        }
    }

    /// A token for others to use, on one thing.
    pub(crate) fn issue_token(&self, resource: Resource, rights: &[Right]) -> Result<Token> {
        Ok(self.bearer.delegate_token(resource, rights, LATEST_TIME)?)
    }

    /// A token for a node that is to read a source.
    pub(crate) fn issue_source_token(&self, source: &VolumeSource) -> Result<Token> {
        let resource = match source {
            VolumeSource::Home { path, .. } => Resource::Home(path.clone()),
            VolumeSource::Volume { volume, .. } => Resource::Volume(*volume),
        };
        self.issue_token(resource, &[Right::Read])
    }

    /// Makes a call that ends soon.
    pub(crate) async fn call<C: Call + Clone>(&self, address: &str, call: C) -> Result<C::Reply> {
        self.call_with_timeout(address, call, CALL_TIMEOUT_MS).await
    }

    /// Makes a call that may take `ms` milliseconds.
    pub(crate) async fn call_with_timeout<C: Call + Clone>(
        &self,
        address: &str,
        call: C,
        ms: u64,
    ) -> Result<C::Reply> {
        let request: Request = call.clone().into();
        let token = self
            .bearer
            .token_for_call(address, &request, clock::now(), ms)?;
        let deadline = Deadline::after_ms(ms);
        let asked = self
            .pool
            .call_with_keepalives(address, &token, call, deadline);
        Ok(asked.await?)
    }

    /// All bytes of a file at a home, which must be this still.
    pub(crate) async fn read_source(
        &self,
        address: &str,
        path: &str,
        identity: SourceIdentity,
    ) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < identity.size {
            let offset = bytes.len() as u64;
            let length = (identity.size - offset).min(u64::from(IO_BYTES_MAX));
            let call = ReadSource {
                path: path.to_owned(),
                identity,
                offset,
                length: u32::try_from(length)?,
                block_bytes: BLOCK_BYTES_DEFAULT,
            };
            let ms = CALL_TIMEOUT_MS;
            let request: Request = call.clone().into();
            let token = self
                .bearer
                .token_for_call(address, &request, clock::now(), ms)?;
            let asked = self.call_with_body(address, &token, (call, Bytes::new()), 1, ms);
            let (_, part) = asked.await?;
            ensure!(!part.is_empty(), "'{path}' is shorter than its home says");
            bytes.extend_from_slice(&part);
        }
        Ok(bytes)
    }

    /// Makes a call with raw data once, as this client's bearer may.
    pub(crate) async fn call_with_data<C: Call + Clone>(
        &self,
        address: &str,
        call: C,
        body: Bytes,
        ms: u64,
    ) -> bafs_proto::Result<(C::Reply, Bytes)> {
        let request: Request = call.clone().into();
        let token = self
            .bearer
            .token_for_call(address, &request, clock::now(), ms)?;
        let deadline = Deadline::after_ms(ms);
        self.pool
            .call_with_body(address, &token, call, body, deadline)
            .await
    }

    /// Makes a call with raw data and this token, up to `tries` times while it fails transiently.
    pub(crate) async fn call_with_body<C: Call + Clone>(
        &self,
        address: &str,
        token: &Token,
        (call, body): (C, Bytes),
        tries: u32,
        ms: u64,
    ) -> Result<(C::Reply, Bytes)> {
        let mut left = tries;
        loop {
            left -= 1;
            let deadline = Deadline::after_ms(ms);
            let (call, body) = (call.clone(), body.clone());
            let asked = self
                .pool
                .call_with_body(address, token, call, body, deadline);
            match asked.await {
                Err(error) if left > 0 && error.code.class() == ErrorClass::Transient => {}
                answer => return Ok(answer?),
            }
        }
    }

    /// Live servers of a kind, or all.
    pub(crate) async fn list_servers(&self, kind: Option<ServerKind>) -> Result<Vec<Advert>> {
        let constraint = Constraint::default();
        self.query_servers(QueryServers { kind, constraint }).await
    }

    /// Live servers that satisfy a query.
    pub(crate) async fn query_servers(&self, query: QueryServers) -> Result<Vec<Advert>> {
        let list = self
            .call(&self.catalog, query)
            .await
            .with_context(|| format!("cannot ask the catalog at {}", self.catalog))?;
        Ok(list.servers)
    }

    /// The node of this name or address.
    pub(crate) async fn find_node(&self, name: &str) -> Result<Advert> {
        select_node(self.list_servers(Some(ServerKind::Node)).await?, name)
    }

    /// Every volume with the node that holds it. Nodes that do not tell theirs are passed over and
    /// named in the second list, with why. All nodes are asked at once, so that a silent one does
    /// not keep the answers of the others waiting.
    pub(crate) async fn list_volumes(&self) -> Result<(Vec<(Advert, VolumeStatus)>, Vec<String>)> {
        let nodes = self.list_servers(Some(ServerKind::Node)).await?;
        let mut asked = Vec::with_capacity(nodes.len());
        for node in nodes {
            let (client, asked_node) = (self.clone(), node.clone());
            let listing = async move { client.list_node_volumes(&asked_node).await };
            asked.push((node, tokio::spawn(listing)));
        }
        let mut found = Vec::new();
        let mut silent = Vec::new();
        for (node, listing) in asked {
            match listing.await.context("a listing").and_then(|listed| listed) {
                Ok(volumes) => found.extend(volumes.into_iter().map(|v| (node.clone(), v))),
                Err(error) => silent.push(format!("{}: {error:#}", node.name)),
            }
        }
        Ok((found, silent))
    }

    /// Every volume of a node.
    pub(crate) async fn list_node_volumes(&self, node: &Advert) -> Result<Vec<VolumeStatus>> {
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
    pub(crate) async fn find_volume(&self, wanted: &str) -> Result<(Advert, VolumeStatus)> {
        let listing = self.list_volumes_for_search().await?;
        self.find_volume_in(&listing, wanted).await
    }

    /// The volume of this id or name in a listing, or in a later one. Nodes tell their volumes at
    /// different moments. So a name that moves from one volume to another, while others come and
    /// go, may seem to be of none or of two: only what two listings show counts.
    pub(crate) async fn find_volume_in(
        &self,
        listing: &VolumeListing,
        wanted: &str,
    ) -> Result<(Advert, VolumeStatus)> {
        let mut found = listing.find_one(wanted);
        let mut earlier_ids = listing.ids_of(wanted);
        for _ in 0..CONFIRMATIONS_MAX {
            if found.is_ok() {
                break;
            }
            let later = self.list_volumes_for_search().await?;
            found = later.find_one(wanted);
            let later_ids = later.ids_of(wanted);
            let is_known = |id: &&VolumeId| earlier_ids.contains(id);
            let is_of_several = later_ids.iter().filter(is_known).count() > 1;
            if is_of_several || (earlier_ids.is_empty() && later_ids.is_empty()) {
                break;
            }
            earlier_ids = later_ids;
        }
        found
    }

    /// All volumes of this id or name, with their nodes: one at least.
    pub(crate) async fn find_volumes(&self, wanted: &str) -> Result<Vec<(Advert, VolumeStatus)>> {
        match self.list_volumes_for_search().await?.find_all(wanted) {
            Ok(found) => Ok(found),
            // As above.
            Err(_) => self.list_volumes_for_search().await?.find_all(wanted),
        }
    }

    /// Every volume, to find several in.
    pub(crate) async fn list_volumes_for_search(&self) -> Result<VolumeListing> {
        let (volumes, silent) = self.list_volumes().await?;
        Ok(VolumeListing { volumes, silent })
    }

    /// A home URL as the wire knows it.
    pub(crate) async fn resolve_source(&self, text: &str) -> Result<VolumeSource> {
        let wrong =
            |why: &dyn std::fmt::Display| UsageError::from_reason(format!("'{text}': {why}"));
        let url: Url = text.parse().map_err(|e| wrong(&e))?;
        if url.scheme != Scheme::Bafs {
            let (address, path) = url.foreign_location().map_err(|e| wrong(&e))?;
            let id = None;
            return Ok(VolumeSource::Home { address, path, id });
        }
        let path = url.path.trim_matches('/').to_owned();
        let homes = self.list_servers(Some(ServerKind::Home)).await;
        if url.host.contains(':') {
            let address = url.host;
            let homes = homes.unwrap_or_default().into_iter();
            let id = homes
                .filter(|home| home.address == address)
                .map(|home| home.id)
                .next();
            return Ok(VolumeSource::Home { address, path, id });
        }
        let none = || {
            ClassifiedError::with_remedy(
                FailureClass::Unreachable,
                format!("no live home '{}'", url.host),
                format!("start one with `bafs home --name {}`", url.host),
            )
        };
        let home = select_home(homes?, &url.host).ok_or_else(none)?;
        Ok(VolumeSource::Home {
            address: home.address,
            path,
            id: Some(home.id),
        })
    }
}

/// Every volume of a cluster, as its nodes told within one listing.
#[derive(Debug)]
pub(crate) struct VolumeListing {
    volumes: Vec<(Advert, VolumeStatus)>,
    /// Nodes that did not tell theirs, with why.
    silent: Vec<String>,
}

impl VolumeListing {
    /// The volume of this id or name, and its node.
    pub(crate) fn find_one(&self, wanted: &str) -> Result<(Advert, VolumeStatus)> {
        let mut matching = self.find_all(wanted)?;
        if matching.len() > 1 {
            let one = |(node, v): &(Advert, VolumeStatus)| {
                let failed = match v.state {
                    VolumeState::Failed => ", failed",
                    VolumeState::Creating | VolumeState::Ready => "",
                };
                format!("{} (on {}{failed})", v.spec.id, node.name)
            };
            let all: Vec<_> = matching.iter().map(one).collect();
            return Err(ClassifiedError::with_remedy(
                FailureClass::Ambiguous,
                format!("several volumes are named '{wanted}'"),
                format!("give the id of one: {}", all.join(", ")),
            ));
        }
        matching.pop().context("a volume was found")
    }

    /// The ids of all volumes of this id or name.
    fn ids_of(&self, wanted: &str) -> Vec<VolumeId> {
        let found = self.find_all(wanted).unwrap_or_default();
        found.iter().map(|(_, volume)| volume.spec.id).collect()
    }

    /// All volumes of this id or name, with their nodes: one at least.
    pub(crate) fn find_all(&self, wanted: &str) -> Result<Vec<(Advert, VolumeStatus)>> {
        let id = wanted.parse::<VolumeId>().ok();
        let is_meant =
            |(_, v): &&(Advert, VolumeStatus)| Some(v.spec.id) == id || v.spec.name == wanted;
        let volumes: Vec<_> = self.volumes.iter().filter(is_meant).cloned().collect();
        if volumes.is_empty() {
            let silent = &self.silent;
            if !silent.is_empty() {
                return Err(ClassifiedError::with_remedy(
                    FailureClass::Unreachable,
                    format!(
                        "volume '{wanted}' is on no reachable node; these nodes do not answer: {}",
                        silent.join("; ")
                    ),
                    "repeat the command when they do",
                ));
            }
            return Err(ClassifiedError::with_remedy(
                FailureClass::NotFound,
                format!("no volume '{wanted}' on any live node"),
                "see `bafs volume list`",
            ));
        }
        Ok(volumes)
    }
}

/// The node of this name or address. Names are what their owners chose, and may be of several.
fn select_node(nodes: Vec<Advert>, wanted: &str) -> Result<Advert> {
    let known: Vec<_> = nodes.iter().map(|node| node.name.clone()).collect();
    let is_meant = |node: &Advert| node.name == wanted || node.address == wanted;
    let mut meant: Vec<Advert> = nodes.into_iter().filter(is_meant).collect();
    if let Some(at) = meant.iter().position(|node| node.address == wanted) {
        return Ok(meant.swap_remove(at));
    }
    if meant.len() > 1 {
        let addresses: Vec<_> = meant.into_iter().map(|node| node.address).collect();
        return Err(ClassifiedError::with_remedy(
            FailureClass::Ambiguous,
            format!("several nodes are named '{wanted}'"),
            format!("give the address of one: {}", addresses.join(" or ")),
        ));
    }
    let none = || {
        ClassifiedError::with_remedy(
            FailureClass::Unreachable,
            format!("no live node '{wanted}'"),
            format!("live nodes: {}", known.join(", ")),
        )
    };
    meant.pop().ok_or_else(none)
}

/// The home of this name, whose letters are small in a URL.
fn select_home(homes: Vec<Advert>, host: &str) -> Option<Advert> {
    let is_named = |home: &Advert| home.name.eq_ignore_ascii_case(host);
    homes.into_iter().find(is_named)
}

/// The identity of the person: the scheduler's, or what `bafs grant` made, which is an
/// agent's that holds a token.
pub(crate) fn load_user_identity(cluster: &Path) -> Result<Identity> {
    match load_granted_identity(cluster) {
        Some(granted) => Ok(granted),
        None => init::load_identity(cluster, Role::Scheduler),
    }
}

fn load_granted_identity(cluster: &Path) -> Option<Identity> {
    if init::identity_directory(cluster, Role::Scheduler).exists() {
        return None;
    }
    let granted = init::load_identity(cluster, Role::Agent).ok();
    granted.filter(|granted| granted.token != Token::none())
}

/// Whether a directory has identities of a machine only, which may be a node and asks for nothing.
pub(crate) fn is_node_identity(cluster: &Path) -> bool {
    let has = |role| init::identity_directory(cluster, role).exists();
    !has(Role::Scheduler)
        && (has(Role::Server) || has(Role::Agent))
        && load_granted_identity(cluster).is_none()
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::ServerId;

    use super::*;
    use bafs_proto::attributes::Attributes;
    use bafs_proto::message::Lifetime;

    fn test_advert(kind: ServerKind, name: &str, address: &str) -> Advert {
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
            attributes: Attributes::default(),
            lifetime: Lifetime::default(),
        }
    }

    #[test]
    fn home_names_ignore_upper_and_lower_case() {
        let home = |name: &str| test_advert(ServerKind::Home, name, "");
        let homes = vec![home("other"), home("MyData")];
        let url: Url = "bafs://MyData/out".parse().expect("a URL");
        let found = select_home(homes.clone(), &url.host).expect("it lives");
        assert_eq!(found.id, homes[1].id);
        assert!(select_home(homes, "my").is_none());
    }

    #[test]
    fn ambiguous_node_name_is_rejected() {
        let node = |name: &str, address: &str| test_advert(ServerKind::Node, name, address);
        let nodes = || vec![node("n1", "a:1"), node("n2", "b:2"), node("n1", "c:3")];
        let found = |wanted: &str| {
            let found = select_node(nodes(), wanted).map(|node| node.address);
            found.map_err(|refusal| refusal.to_string())
        };
        assert_eq!(found("n2").unwrap(), "b:2");
        assert_eq!(found("c:3").unwrap(), "c:3");
        let said = found("n1").unwrap_err();
        assert!(said.contains("several nodes"), "{said}");
        assert!(said.ends_with("of one: a:1 or c:3"), "{said}");
        assert!(found("n3").unwrap_err().contains("live nodes: n1, n2, n1"));
    }

    #[test]
    fn directory_without_scheduler_identity_belongs_to_a_node() {
        let cluster = tempfile::tempdir().expect("a directory");
        assert!(!is_node_identity(cluster.path()), "nothing is there");
        init::create_identities(cluster.path(), LATEST_TIME).expect("identities");
        assert!(!is_node_identity(cluster.path()));
        let scheduler = init::identity_directory(cluster.path(), Role::Scheduler);
        std::fs::rename(scheduler, cluster.path().join("elsewhere")).expect("it is there");
        assert!(is_node_identity(cluster.path()));
    }
}
