//! What a failure means and what runs again. Table of contents only.

pub(crate) mod alike_volumes;
pub(crate) mod attribution;
pub(crate) mod full_disk;
pub(crate) mod recovery;
pub(crate) mod resize;
pub(crate) mod returned_nodes;
pub(crate) mod sizes;
