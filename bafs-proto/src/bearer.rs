//! Who holds a token and shows each server no more of it than its call needs: a server that keeps
//! what it saw can do nothing with it at another. Checks nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, ErrorCode, Result};
use crate::fd_passing::HandoffTarget;
use crate::ids::{RunId, VolumeId};
use crate::message::{BlockRange, CacheRef, CreateVolume, Request, TreeRef};
use crate::time::Time;
use crate::token::{Resource, Right, Token, Verifier};

/// What is shown is good for so long after the call's end, in milliseconds. Clocks of two machines
/// may differ by half of that.
const NARROWED_TOKEN_LIFETIME_MS: u64 = 3_600_000;

/// Most tokens that are kept to be shown again: to make one takes two signatures.
const CACHED_TOKENS_MAX: usize = 4_096;

const READ: &[Right] = &[Right::Read];
const READ_WRITE: &[Right] = &[Right::Read, Right::Write];
const MANAGE: &[Right] = &[Right::Manage];
const ALL: &[Right] = &[Right::Read, Right::Write, Right::Manage];

/// What a call needs, and whether a server that is not the one called could use it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct RequiredRights {
    resources: Vec<Resource>,
    rights: &'static [Right],
    /// The address, where what is shown is good for this server only.
    server: Option<String>,
}

/// Holds a token.
#[derive(Debug)]
pub struct Bearer {
    token: Token,
    verifier: Verifier,
    narrowed_tokens: Mutex<BTreeMap<RequiredRights, (Token, Time)>>,
}

impl Bearer {
    /// The bearer of `token`.
    pub fn new(token: Token, verifier: Verifier) -> Self {
        Self {
            token,
            verifier,
            narrowed_tokens: Mutex::default(),
        }
    }

    /// The token for one call, which lasts `ms` milliseconds at most, to the server at `address`.
    ///
    /// # Errors
    /// As [`Verifier::narrow`]; `Unsupported` for a call that no bearer makes.
    pub fn token_for_call(
        &self,
        address: &str,
        request: &Request,
        now: Time,
        ms: u64,
    ) -> Result<Token> {
        let need = required_rights(address, request)?;
        let mut shown = self
            .narrowed_tokens
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((token, expires)) = shown.get(&need)
            && expires.ms_since(now.plus_ms(ms)) > NARROWED_TOKEN_LIFETIME_MS / 2
        {
            return Ok(token.clone());
        }
        if shown.len() >= CACHED_TOKENS_MAX {
            shown.clear();
        }
        let (token, verifier) = (&self.token, &self.verifier);
        let expires = now.plus_ms(ms).plus_ms(NARROWED_TOKEN_LIFETIME_MS);
        let narrow = match &need.server {
            Some(server) => {
                verifier.narrow_for_server(token, server, &need.resources, need.rights, expires)?
            }
            None => verifier.narrow(token, &need.resources, need.rights, expires)?,
        };
        shown.insert(need, (narrow.clone(), expires));
        Ok(narrow)
    }

    /// A token to give away: at most `rights` on `resource`, until `expires`, at any server.
    ///
    /// # Errors
    /// As [`Verifier::narrow`].
    pub fn delegate_token(
        &self,
        resource: Resource,
        rights: &[Right],
        expires: Time,
    ) -> Result<Token> {
        self.verifier
            .narrow(&self.token, &[resource], rights, expires)
    }
}

/// A copy is made from what its base has.
fn required_rights_to_copy(address: &str, copy: VolumeId, base: VolumeId) -> RequiredRights {
    RequiredRights {
        resources: vec![Resource::Volume(copy), Resource::Volume(base)],
        rights: MANAGE,
        server: Some(address.to_owned()),
    }
}

fn required_rights(address: &str, request: &Request) -> Result<RequiredRights> {
    let (resource, rights) = match request {
        Request::RenewVolumes(call) => return Ok(required_rights_to_renew(address, &call.volumes)),
        Request::CreateVolume(CreateVolume {
            spec,
            base: Some(base),
            ..
        }) => return Ok(required_rights_to_copy(address, spec.id, *base)),
        Request::QueryServers(_) | Request::ReadCounters(_) => (Resource::Catalog, READ),
        Request::ListSource(call) => (Resource::Home(call.path.clone()), READ),
        Request::StatSource(call) => (Resource::Home(call.path.clone()), READ),
        Request::ReadSource(call) => (Resource::Home(call.path.clone()), READ),
        Request::ReadSources(call) => (Resource::Home(call.path.clone()), READ),
        Request::ReadDigests(call) => (Resource::Home(call.path.clone()), READ),
        Request::IssueUploadEpoch(call) => (Resource::Home(call.path.clone()), READ_WRITE),
        Request::CreateVolume(call) => (Resource::Volume(call.spec.id), MANAGE),
        Request::ListVolumes(_) => (Resource::Volumes, READ),
        Request::GetVolume(call) => (Resource::Volume(call.volume), MANAGE),
        Request::DeleteVolume(call) => (Resource::Volume(call.volume), MANAGE),
        Request::InvalidateVolume(call) => (Resource::Volume(call.volume), MANAGE),
        Request::ResizeVolume(call) => (Resource::Volume(call.volume), MANAGE),
        Request::ExtractFile(call) => (Resource::Volume(call.volume), MANAGE),
        Request::GetCache(call) => (Resource::Volume(call.volume), MANAGE),
        Request::WarmCache(call) => (Resource::Volume(call.volume), MANAGE),
        Request::ListVolumeTree(call) => (Resource::Volume(call.volume), READ),
        Request::ReadVolumeFile(call) => (Resource::Volume(call.volume), READ),
        Request::ReadVolumeFiles(call) => (Resource::Volume(call.volume), READ),
        Request::MapVolumeFile(call) => (Resource::Volume(call.volume), READ),
        Request::ReadManifest(call) => (Resource::Volume(call.volume), READ),
        Request::ReadBlocks(call) => block_rights(&call.range),
        Request::Probe(call) => block_rights(&call.range),
        Request::Promote(call) => block_rights(&call.range),
        Request::Touch(call) => block_rights(&call.range),
        Request::OpenTree(call) => (
            tree_resource(&call.tree),
            if call.writable { READ_WRITE } else { READ },
        ),
        Request::RunFileOps(call) => (tree_resource(&call.tree), READ_WRITE),
        Request::CloseTree(call) => (tree_resource(&call.tree), READ_WRITE),
        Request::GetHandoffTicket(call) => match &call.target {
            HandoffTarget::Tree { tree: of, .. } => (tree_resource(of), READ_WRITE),
            HandoffTarget::Cache { volume, .. } => (Resource::Volume(*volume), READ),
        },
        Request::StartJob(_)
        | Request::WatchJobs(_)
        | Request::ReadJobOutput(_)
        | Request::FindPrograms(_)
        | Request::KillJob(_)
        | Request::SetNodeQuota(_)
        | Request::DrainNode(_) => (Resource::Jobs, MANAGE),
        Request::ListRetainedData(_) | Request::DropRetainedData(_) => (Resource::Volumes, MANAGE),
        // A user may hold rights on the workflows of others, too; a service tells them apart.
        Request::CallQueue(_) => (Resource::Queue(String::new()), ALL),
        Request::Advertise(_)
        | Request::BeginPut(_)
        | Request::PutRange(_)
        | Request::CommitPut(_)
        | Request::PutFiles(_)
        | Request::JoinCache(_) => {
            let text = format!("only servers call {}", request.name());
            return Err(Error::new(ErrorCode::Unsupported, text));
        }
    };
    Ok(RequiredRights {
        server: is_of_node(&resource).then(|| address.to_owned()),
        resources: vec![resource],
        rights,
    })
}

/// Only nodes are many and of many owners; a home is reached by several names, and what is shown to
/// it, or to a service, is of no use at a node.
fn is_of_node(resource: &Resource) -> bool {
    !matches!(
        resource,
        Resource::Catalog | Resource::Home(_) | Resource::Queue(_)
    )
}

/// A run renews hundreds of volumes at once, more than a token has room to name.
fn block_rights(range: &BlockRange) -> (Resource, &'static [Right]) {
    let resource = match &range.cache {
        CacheRef::Volume(id) => Resource::Volume(*id),
        CacheRef::Cooperative(name) => Resource::Cooperative(name.clone()),
    };
    (resource, READ)
}

fn required_rights_to_renew(address: &str, volumes: &[VolumeId]) -> RequiredRights {
    let runs: BTreeSet<RunId> = volumes.iter().map(|id| RunId::from_derived(id.0)).collect();
    RequiredRights {
        resources: runs.into_iter().map(Resource::RunVolumes).collect(),
        rights: MANAGE,
        server: Some(address.to_owned()),
    }
}

fn tree_resource(tree: &TreeRef) -> Resource {
    match tree {
        TreeRef::Volume(id) => Resource::Volume(*id),
        TreeRef::Home(path) => Resource::Home(path.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::ExecutionId;
    use crate::message::{DeleteVolume, KillJob, QueryServers, RenewVolumes, StatSource};
    use crate::token::Signer;

    const NOW: Time = Time(1_000_000);
    const RIGHTS: [Right; 3] = [Right::Read, Right::Write, Right::Manage];

    struct BearerFixture {
        bearer: Bearer,
        verifier: Verifier,
    }

    impl BearerFixture {
        fn new() -> Self {
            let signer = Signer::generate();
            let token = signer
                .grant(&[Resource::Cluster], &RIGHTS, Time(1 << 50))
                .expect("grant");
            let verifier = signer.verifier();
            Self {
                bearer: Bearer::new(token, verifier.clone()),
                verifier,
            }
        }

        fn token_for_request(&self, request: impl Into<Request>) -> Token {
            let shown = self.bearer.token_for_call("a:1", &request.into(), NOW, 0);
            shown.expect("a token")
        }

        /// What of `resources` the token is good for, at a server.
        fn granted_rights(
            &self,
            token: &Token,
            server: Option<&str>,
            resources: &[Resource],
        ) -> Vec<(usize, Right)> {
            let all = (0..resources.len()).flat_map(|one| RIGHTS.map(|right| (one, right)));
            all.filter(|(one, right)| {
                let (verifier, resource) = (&self.verifier, &resources[*one]);
                let asked = verifier.verify_for_server(token, server, resource, *right, NOW);
                asked.is_ok()
            })
            .collect()
        }
    }

    fn volume(run: u64, number: u64) -> VolumeId {
        VolumeId(RunId(run).derive(number))
    }

    fn resources() -> Vec<Resource> {
        vec![
            Resource::Volume(volume(1, 1)),
            Resource::Volume(volume(1, 2)),
            Resource::Volume(volume(2, 1)),
            Resource::Jobs,
            Resource::Catalog,
            Resource::Home("data".to_owned()),
            Resource::Home("other".to_owned()),
            Resource::Cooperative("c".to_owned()),
        ]
    }

    #[test]
    fn tokens_are_narrowed_to_the_call_and_server() {
        let fixture = BearerFixture::new();
        let volumes = vec![volume(1, 1), volume(1, 2)];
        let execution = ExecutionId(1);
        let cases: [(Request, &[usize]); 3] = [
            (DeleteVolume { volume: volumes[0] }.into(), &[0]),
            (
                RenewVolumes {
                    volumes,
                    lifetime_ms: 0,
                    gives_way: false,
                }
                .into(),
                &[0, 1],
            ),
            (KillJob { execution }.into(), &[3]),
        ];
        for (request, expected) in cases {
            let name = request.name();
            let token = fixture.token_for_request(request);
            let expected: Vec<_> = expected.iter().map(|one| (*one, Right::Manage)).collect();
            let here = fixture.granted_rights(&token, Some("a:1"), &resources());
            assert_eq!(here, expected, "{name}");
            for elsewhere in [Some("b:1"), None] {
                let there = fixture.granted_rights(&token, elsewhere, &resources());
                assert_eq!(there, vec![], "{name} at {elsewhere:?}");
            }
        }
    }

    #[test]
    fn catalog_and_home_get_only_their_rights() {
        let fixture = BearerFixture::new();
        let token = fixture.token_for_request(QueryServers::default());
        let found = fixture.granted_rights(&token, None, &resources());
        assert_eq!(found, vec![(4, Right::Read)]);
        let path = "data".to_owned();
        let token = fixture.token_for_request(StatSource { path });
        let found = fixture.granted_rights(&token, None, &resources());
        assert_eq!(found, vec![(5, Right::Read)]);
    }

    #[test]
    fn narrowed_tokens_are_reused_until_they_age() {
        let fixture = BearerFixture::new();
        let execution = ExecutionId(1);
        let kill = Request::from(KillJob { execution });
        let show = |address, now, ms| {
            fixture
                .bearer
                .token_for_call(address, &kill, now, ms)
                .expect("a token")
        };
        let first = show("a:1", NOW, 20);
        let soon = NOW.plus_ms(NARROWED_TOKEN_LIFETIME_MS / 4);
        assert_eq!(show("a:1", soon, 20), first);
        assert_ne!(show("b:1", soon, 20), first);
        // A long call must not outlive what it shows.
        assert_ne!(show("a:1", soon, NARROWED_TOKEN_LIFETIME_MS), first);
        let late = NOW.plus_ms(NARROWED_TOKEN_LIFETIME_MS);
        let second = show("a:1", late, 20);
        let ask = |token, now| {
            let (server, right) = (Some("a:1"), Right::Manage);
            let verifier = &fixture.verifier;
            verifier.verify_for_server(token, server, &Resource::Jobs, right, now)
        };
        assert_eq!(
            ask(&second, late.plus_ms(NARROWED_TOKEN_LIFETIME_MS)),
            Ok(())
        );
        let expired = ask(&first, late.plus_ms(NARROWED_TOKEN_LIFETIME_MS)).expect_err("it is old");
        assert_eq!(expired.code, ErrorCode::TokenExpired);
    }
}
