//! Which rights a request to a home server needs, and which requests it does not serve.

use std::sync::Arc;

use bafs_proto::limits::PUT_FILES_MAX;
use bafs_proto::message::{PutFile, Request, TreeRef};
use bafs_proto::token::{Resource, Right, Token};
use bafs_proto::{Error, ErrorCode, Result};

use crate::access::RequiredRight;

pub(super) fn unsupported_error(request: &Request) -> Error {
    let text = format!(
        "a home server does not answer {}; ask a node",
        request.name()
    );
    Error::new(ErrorCode::Unsupported, text)
}

/// What is sure to be asked of a request's tokens; each is demanded where it is used, with what
/// links lead to.
pub(super) fn required_rights(token: &Token, request: &Request) -> Vec<RequiredRight> {
    let shared = Arc::new(token.clone());
    let at = |path: &str, right| vec![(shared.clone(), Resource::Home(path.to_owned()), right)];
    match request {
        Request::ListSource(call) => at(&call.path, Right::Read),
        Request::StatSource(call) => at(&call.path, Right::Read),
        Request::ReadSource(call) => at(&call.path, Right::Read),
        Request::ReadSources(call) => at(&call.path, Right::Read),
        Request::ReadDigests(call) => at(&call.path, Right::Read),
        Request::BeginPut(call) => at(&call.path, Right::Write),
        Request::IssueUploadEpoch(call) => at(&call.path, Right::Write),
        Request::PutFiles(call) => {
            let one = |file: &PutFile| {
                let resource = Resource::Home(file.path.clone());
                (Arc::new(file.token.clone()), resource, Right::Write)
            };
            call.files.iter().take(PUT_FILES_MAX).map(one).collect()
        }
        Request::OpenTree(call) => match (&call.tree, call.writable) {
            (TreeRef::Home(path), true) => at(path, Right::Write),
            (TreeRef::Home(path), false) => at(path, Right::Read),
            (TreeRef::Volume(_), _) => Vec::new(),
        },
        Request::ReadCounters(_) => vec![(shared, Resource::Catalog, Right::Read)],
        // What the others need is known with the upload or the session.
        _ => Vec::new(),
    }
}

/// The path of a tree of a home server.
pub(super) fn home_path(tree: &TreeRef) -> Result<&str> {
    match tree {
        TreeRef::Home(path) => {
            bafs_proto::path::check_relative(path)?;
            Ok(path)
        }
        TreeRef::Volume(volume) => {
            let text = format!("a home server holds no volume {volume}; ask the node that does");
            Err(Error::new(ErrorCode::Unsupported, text))
        }
    }
}
