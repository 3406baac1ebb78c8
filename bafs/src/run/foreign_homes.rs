//! What homes have that are no home servers: web servers, buckets and others. This machine asks
//! them itself, as nodes do; of those that it may not ask, nothing is known.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use bafs_proto::{Error, ErrorCode};
use bafs_sched::earlier_work::SourceState;
use bafs_server::home_clients::{HomeLister, HomeSettings};
use bafs_workflow::Url;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::home_state::{CALLS_MAX, to_source};
use crate::output::print_notice;

/// The file that tells a node how it reaches such homes. With it on this machine, as for a local
/// run, their sources are compared.
const SETTINGS_VARIABLE: &str = "BAFS_HOMES";

/// Lists sources at homes of other kinds, many at once.
///
/// # Errors
/// The system gives no thread.
pub(super) fn look_at_foreign_homes(sources: BTreeSet<Url>) -> Result<BTreeMap<Url, SourceState>> {
    if sources.is_empty() {
        return Ok(BTreeMap::new());
    }
    let named = std::env::var_os(SETTINGS_VARIABLE).filter(|path| !path.is_empty());
    let loaded = named.map(|path| HomeSettings::load(&PathBuf::from(path)));
    let settings = loaded.transpose().unwrap_or_else(|error| {
        print_notice(&format!("{error}; homes that need it are not compared"));
        None
    });
    let settings = settings.unwrap_or_default();
    // The caller is in a runtime, which must not block.
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            Ok(runtime.block_on(list_sources(HomeLister::new(settings), sources)))
        });
        let ended = asking.join();
        ended.unwrap_or_else(|_| Err(anyhow!("a call to a home failed")))
    })
}

async fn list_sources(lister: HomeLister, sources: BTreeSet<Url>) -> BTreeMap<Url, SourceState> {
    let (lister, permits) = (Arc::new(lister), Arc::new(Semaphore::new(CALLS_MAX)));
    let mut asking = JoinSet::new();
    for url in sources {
        let (lister, permits) = (Arc::clone(&lister), Arc::clone(&permits));
        asking.spawn(async move {
            let _permit = permits.acquire_owned().await;
            let listed = match url.foreign_location() {
                Ok((address, path)) => lister.list(&address, &path).await,
                Err(error) => Err(Error::new(ErrorCode::Malformed, error.message)),
            };
            (url, to_source(listed))
        });
    }
    asking.join_all().await.into_iter().collect()
}
