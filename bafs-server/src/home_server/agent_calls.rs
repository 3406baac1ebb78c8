//! Calls of agents that read and write home files by a session, as they do those of a volume.

use std::sync::Arc;

use bafs_proto::message::{CloseTree, Done, OpenTree, Reply, Request, RunFileOps, TreeSession};
use bafs_proto::token::{Right, Token};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::Tree;
use bytes::Bytes;

use super::throttle::CallWait;
use super::{HomeServer, OWN_DIRECTORY, check_result_path, home_path, unsupported_error};

impl HomeServer {
    /// The calls of agents that read and write home files.
    pub(super) async fn answer_session(
        self: Arc<Self>,
        token: Token,
        request: Request,
        body: Bytes,
        wait: CallWait<'_>,
    ) -> Result<(Reply, Bytes)> {
        let reply = match request {
            Request::OpenTree(call) => Reply::OpenTree(self.open_tree(token, call).await?),
            Request::RunFileOps(call) => {
                self.clone().run_blocking(|_| Ok(())).await?;
                return self.run_ops(&token, call, body, wait).await;
            }
            Request::CloseTree(call) => Reply::CloseTree(self.close_tree(&token, &call).await?),
            other => return Err(unsupported_error(&other)),
        };
        Ok((reply, Bytes::new()))
    }

    async fn open_tree(self: &Arc<Self>, token: Token, call: OpenTree) -> Result<TreeSession> {
        let path = home_path(&call.tree)?.to_owned();
        let writable = call.writable;
        let open = move |home: &Self| {
            let right = if writable { Right::Write } else { Right::Read };
            home.require_right(&token, &path, right)?;
            let found = match home.find_for_token(&token, &path, right) {
                Err(error) if writable && error.code == ErrorCode::NotFound => {
                    check_result_path(&path)?;
                    let allow = |place: &str| home.require_right(&token, place, right);
                    let made = home.export.make_directory(&path, &allow)?;
                    allow(&made.path)?;
                    made
                }
                other => other?,
            };
            let hidden = home
                .export
                .is_root(&found.stat)
                .then_some(OWN_DIRECTORY.as_bytes());
            Tree::open_at(found.fd, None, hidden).map_err(|error| {
                let code = match error.kind() {
                    std::io::ErrorKind::NotADirectory => ErrorCode::WrongState,
                    _ => ErrorCode::ServerFault,
                };
                Error::new(code, format!("cannot open '{path}': {error}"))
            })
        };
        let tree = self.clone().run_blocking(open).await?;
        self.trees.open(tree, call).await
    }

    async fn run_ops(
        &self,
        token: &Token,
        call: RunFileOps,
        body: Bytes,
        wait: CallWait<'_>,
    ) -> Result<(Reply, Bytes)> {
        let path = home_path(&call.tree)?;
        self.trees.authorise(&call.tree, call.epoch, |right| {
            self.require_right(token, path, right)
        })?;
        self.throttle.pass(body.len(), wait).await?;
        let written = body.len() as u64;
        let (results, data) = self.trees.run(call, body).await?;
        self.throttle.pass(data.len(), wait).await?;
        self.counters.add("home_written_bytes", written);
        self.counters.add("home_read_bytes", data.len() as u64);
        Ok((Reply::RunFileOps(results), data))
    }

    async fn close_tree(&self, token: &Token, call: &CloseTree) -> Result<Done> {
        let path = home_path(&call.tree)?;
        self.trees
            .close(call, |right| self.require_right(token, path, right))
            .await?;
        Ok(Done)
    }
}
