//! Says whose fault a failed read is: the error that an agent or a peer gets. Sends nothing.

use bafs_proto::message::FetchScope;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};

use super::fetcher::Fetcher;
use crate::cache::block_run::BlockRun;
use crate::cache::generation::Generation;
use crate::clock;

/// After so long without data a home counts as unreachable, in milliseconds.
const HOME_SILENT_MS: u64 = 5_000;

/// A reader that waited less than this cannot say that home is silent, in microseconds.
const WAITED_US_MIN: u64 = 1_000_000;

/// The error of an agent that asked at `began` (ticks). `HomeUnreachable` when home is at fault,
/// `InProgress` when home is only slow.
pub(crate) fn agent_error(
    fetcher: &Fetcher,
    generation: &Generation,
    run: &BlockRun,
    began: u64,
    error: Error,
) -> Error {
    let waited_us = clock::monotonic_us().saturating_sub(began);
    let is_late = matches!(error.code, ErrorCode::DeadlineExceeded | ErrorCode::Busy);
    if !is_late || waited_us < WAITED_US_MIN {
        return error;
    }
    // A peer says `Busy` of a home that has sent it something lately.
    if error.code == ErrorCode::Busy {
        return Error::new(ErrorCode::InProgress, error.detail);
    }
    let now = clock::now();
    let last = fetcher.last_home_answer(generation);
    let silent_ms = now.ms_since(last);
    let inflight = &generation.inflight;
    let waits_for_peers = inflight.is_running(run, FetchScope::AnyNode)
        || inflight.is_running(run, FetchScope::PrimaryNode);
    let waits_for_home = inflight.is_running(run, FetchScope::Home);
    let recent_ms = HOME_SILENT_MS.max(waited_us / 1_000);
    let peers_silent_ms = now.ms_since(inflight.peers_home_answer());
    let is_in_progress = silent_ms < recent_ms && (waits_for_home || waits_for_peers)
        || peers_silent_ms < recent_ms && waits_for_peers;
    if is_in_progress {
        return Error::new(ErrorCode::InProgress, error.detail);
    }
    if silent_ms < recent_ms || !waits_for_home {
        return error;
    }
    let home = generation.store.manifest.home().address;
    let silence = match last {
        Time(0) => "yet".to_owned(),
        _ => format!("for {} s", silent_ms / 1000),
    };
    let text = format!(
        "home {home} has sent no data {silence}; check that it runs and that this node can reach it"
    );
    Error::new(ErrorCode::HomeUnreachable, text)
}

/// The error of a peer: this server lives, and home may answer later. A busy link is no unreachable
/// home; peers that asked home themselves would only add to its load.
pub(crate) fn peer_error(fetcher: &Fetcher, generation: &Generation, error: Error) -> Error {
    let silent_ms = clock::now().ms_since(fetcher.last_home_answer(generation));
    let code = match error.code {
        ErrorCode::Unreachable => ErrorCode::HomeUnreachable,
        ErrorCode::DeadlineExceeded if silent_ms >= HOME_SILENT_MS => ErrorCode::HomeUnreachable,
        ErrorCode::SourceChanged
        | ErrorCode::VolumeLost
        | ErrorCode::NotFound
        | ErrorCode::HomeUnreachable
        | ErrorCode::Malformed => return error,
        ErrorCode::DeadlineExceeded | ErrorCode::Busy => ErrorCode::Busy,
        _ => ErrorCode::ServerFault,
    };
    Error::new(code, error.detail)
}

/// How long home has been silent here, in milliseconds, for a peer that waits for this server. It
/// leaves out reports of peers: they would circulate and never grow old.
pub(crate) fn home_silence_ms(fetcher: &Fetcher, generation: &Generation) -> Option<u64> {
    let last = fetcher.last_home_answer(generation);
    (last != Time(0)).then(|| clock::now().ms_since(last))
}
