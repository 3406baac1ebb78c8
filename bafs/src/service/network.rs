//! The service on the network: who asks, by which right, and what is answered.

use std::sync::Arc;

use bafs_api::PageServer;
use bafs_proto::message::{Reply, Request};
use bafs_proto::net::{BoxFuture, IncomingRequest, Service};
use bafs_proto::queue_call::QueueAnswer;
use bafs_proto::token::{Resource, Right, Token, Verifier};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_queue::{QueueControl, Requester};
use bafs_server::clock;
use bytes::Bytes;
use serde::Serialize;
use tokio::sync::Semaphore;

use super::calls::{
    Changed, PAGE_WORKFLOWS, PageOpened, QueueRequest, Submitted, UserAdded, UserList, WorkflowPage,
};
use super::queue_service::QueueService;

/// Calls that are worked on at once: each may parse a workflow of some megabytes.
const CALLS_MAX: usize = 8;

/// The user of an operator who names none.
const OPERATOR: &str = "operator";

/// Answers calls.
pub(super) struct NetworkService {
    queue: Arc<QueueService>,
    verifier: Verifier,
    places: Semaphore,
    /// The page, if the service has one.
    page: Option<PageServer>,
}

impl NetworkService {
    pub(super) fn new(
        queue: Arc<QueueService>,
        verifier: Verifier,
        page: Option<PageServer>,
    ) -> Self {
        let places = Semaphore::new(CALLS_MAX);
        Self {
            queue,
            verifier,
            places,
            page,
        }
    }

    /// Who asks. A token of a removed user, or of an older generation, is of no use.
    fn authenticate(&self, token: &Token, user: Option<&str>) -> Result<Requester> {
        let now = clock::now();
        let verify = |resource, right| {
            self.verifier
                .verify(token, &Resource::Queue(resource), right, now)
        };
        let Some(user) = user else {
            verify(String::new(), Right::Manage)?;
            return Ok(operator(OPERATOR));
        };
        let refused = || {
            let text = format!(
                "the service does not accept this identity of '{user}'; ask its operator for \
                 `bafs user add {user}`"
            );
            Error::new(ErrorCode::TokenInvalid, text)
        };
        if verify(String::new(), Right::Manage).is_ok() {
            return Ok(operator(user));
        }
        let generation = self.queue.active_generation(user).ok_or_else(refused)?;
        verify(format!("{user}/{generation}"), Right::Write).map_err(|error| match error.code {
            ErrorCode::RightMissing => refused(),
            _ => error,
        })?;
        Ok(Requester {
            user: user.to_owned(),
            is_operator: false,
            sees_others: verify(String::new(), Right::Read).is_ok(),
        })
    }

    fn answer(&self, incoming: &IncomingRequest) -> Result<Vec<u8>> {
        let Request::CallQueue(call) = &incoming.request else {
            let text = format!(
                "a workflow service does not answer {}; ask a node, a home or the catalog",
                incoming.request.name()
            );
            return Err(Error::new(ErrorCode::Unsupported, text));
        };
        let requester = self.authenticate(&incoming.token, call.user.as_deref())?;
        let request: QueueRequest = serde_json::from_slice(&incoming.body).map_err(|error| {
            Error::new(
                ErrorCode::Malformed,
                format!("a call to the queue: {error}"),
            )
        })?;
        self.answer_request(&requester, request)
    }

    fn answer_request(&self, requester: &Requester, request: QueueRequest) -> Result<Vec<u8>> {
        let queue = &self.queue;
        match request {
            QueueRequest::Submit(submission) => encode(&Submitted {
                workflow: queue.submit(requester, submission)?,
            }),
            QueueRequest::List { after, has_ended } => {
                let all = queue.list(requester)?.into_iter();
                let mut workflows = all.filter(|it| {
                    after.is_none_or(|after| it.id > after) && (has_ended || !it.state.is_over())
                });
                let page: Vec<_> = workflows.by_ref().take(PAGE_WORKFLOWS).collect();
                let last = page.last().map(|it| it.id);
                encode(&WorkflowPage {
                    next: workflows.next().and(last),
                    workflows: page,
                })
            }
            QueueRequest::Hold(id) => done(queue.hold(requester, id)),
            QueueRequest::Release(id) => done(queue.release(requester, id)),
            QueueRequest::Remove(id) => done(queue.remove(requester, id)),
            QueueRequest::SetPriority(id, priority) => {
                done(queue.set_priority(requester, id, priority))
            }
            QueueRequest::AddUser { name, homes, quota } => {
                let generation = queue.add_user(requester, &name, &homes, quota)?;
                self.end_sessions(&name);
                encode(&UserAdded {
                    generation,
                    catalog: queue.catalog.clone(),
                })
            }
            QueueRequest::ListUsers => encode(&UserList {
                users: queue.list_users(requester)?,
            }),
            QueueRequest::OpenPage => {
                let page = self.page.as_ref().ok_or_else(|| {
                    let text = "this service has no page; its operator starts it with --page";
                    Error::new(ErrorCode::Unsupported, text)
                })?;
                let link = page.access().create_login_link(requester.clone());
                encode(&PageOpened {
                    page: link.to_string(),
                })
            }
            QueueRequest::RemoveUser(name) => {
                queue.remove_user(requester, &name)?;
                self.end_sessions(&name);
                encode(&Changed {})
            }
        }
    }

    /// Browsers lose what an identity gave them when the service accepts that no more.
    fn end_sessions(&self, user: &str) {
        if let Some(page) = &self.page {
            page.access().revoke_user(user);
        }
    }
}

impl Service for NetworkService {
    fn serve(
        self: Arc<Self>,
        incoming: IncomingRequest,
    ) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
        Box::pin(async move {
            let Ok(_place) = self.places.acquire().await else {
                return Err(Error::new(ErrorCode::Busy, "the service ends"));
            };
            let service = self.clone();
            let answered = tokio::task::spawn_blocking(move || service.answer(&incoming));
            let answer = answered.await.map_err(|error| {
                Error::new(ErrorCode::ServerFault, format!("the call failed: {error}"))
            })??;
            Ok((Reply::CallQueue(QueueAnswer {}), Bytes::from(answer)))
        })
    }
}

fn operator(user: &str) -> Requester {
    Requester {
        user: user.to_owned(),
        is_operator: true,
        sees_others: true,
    }
}

fn done(result: Result<()>) -> Result<Vec<u8>> {
    result?;
    encode(&Changed {})
}

fn encode(answer: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(answer)
        .map_err(|error| Error::new(ErrorCode::ServerFault, format!("encode: {error}")))
}
