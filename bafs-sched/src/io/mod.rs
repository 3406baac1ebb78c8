//! What the scheduler does to the world: its journal, and its calls to servers.
//!
//! Nothing here decides about jobs or data. The [driver](crate::driver) passes an action to one of
//! these modules, and gets an event back:
//!
//! * [`journal`]: the durable events of a run.
//! * `servers`: one function for each call about volumes, jobs and extraction. A failed call is
//!   repeated for a while, mostly 20 s. Then an event says that it failed, and the core decides.
//! * `job_watch`: waits for the ends of the executions of a node, by long polling.
//! * `volume_copy`, `file_extraction`: replicas and results, which nodes make when they are asked.
//! * `upload_epochs`: the order of results at home, so that a late node replaces no newer one.
//! * [`homes`], `home_lookup`: which home a URL of the workflow means.
//! * `listing_tracker`: what is new in the catalog's list of nodes.
//! * `connectivity`, `node_probe`: which servers answer. If all are silent at once, the scheduler
//!   is cut off, and no node counts as lost.
//! * `node_quotas`: what the run asks nodes to keep for it, where several runs share them.
//! * `remote_io`: directories at home in place of scratch volumes (`bafs run --remote-io`).
//! * [`job_logs`], [`user_commands`]: what jobs printed, and commands of users, in files beside the
//!   journal.
//!
//! **Errors.** A failed call becomes an event. A transient error is repeated first. Errors of the
//! journal end the run.
//!
//! **Concurrency.** Each call runs in a task of the driver. Shared knowledge, such as homes and
//! connectivity, has a mutex that is never held during a call.
//!
//! Every call carries an id that the core chose. So a call that is repeated after a crash has no
//! second effect.

pub(crate) mod calls;
pub mod connectivity;
mod file_extraction;
pub mod followed_output;
pub(crate) mod home_aliases;
mod home_lookup;
pub mod homes;
pub mod job_logs;
pub(crate) mod job_watch;
pub mod journal;
pub mod listing_tracker;
mod node_probe;
pub(crate) mod node_quotas;
pub(crate) mod remote_io;
pub(crate) mod servers;
pub(crate) mod upload_epochs;
pub mod user_commands;
pub(crate) mod volume_copy;
