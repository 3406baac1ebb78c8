//! Which servers asked in vain for which blocks: they may have read them from home since. Asks
//! nobody.

use std::collections::{BTreeMap, VecDeque};

use bafs_proto::ids::ServerId;

use super::blocks::BlockKey;

/// Most claims that are remembered: those of the last 4 GiB, with blocks of 64 KiB.
const CLAIMS_MAX: usize = 1 << 16;

/// Claims of servers on blocks, the oldest forgotten first.
#[derive(Debug, Default)]
pub(crate) struct BlockClaims {
    servers_by_block: BTreeMap<BlockKey, Vec<ServerId>>,
    order: VecDeque<(BlockKey, ServerId)>,
}

impl BlockClaims {
    /// A server asked for a block that was not to be had here.
    pub(crate) fn note_claim(&mut self, key: BlockKey, server: ServerId) {
        let servers = self.servers_by_block.entry(key).or_default();
        if servers.contains(&server) {
            return;
        }
        servers.push(server);
        self.order.push_back((key, server));
        if self.order.len() > CLAIMS_MAX
            && let Some((key, server)) = self.order.pop_front()
            && let Some(servers) = self.servers_by_block.get_mut(&key)
        {
            servers.retain(|other| *other != server);
            if servers.is_empty() {
                self.servers_by_block.remove(&key);
            }
        }
    }

    /// Who may have a block.
    pub(crate) fn claimants(&self, key: BlockKey) -> &[ServerId] {
        self.servers_by_block.get(&key).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::{BlockIndex, FileIndex};

    use super::*;

    #[test]
    fn the_oldest_claims_are_forgotten() {
        let key = |block| BlockKey {
            file: FileIndex(0),
            block: BlockIndex(block),
        };
        let mut claims = BlockClaims::default();
        for _ in 0..2 {
            for server in [1, 2] {
                claims.note_claim(key(0), ServerId(server));
            }
        }
        assert_eq!(claims.claimants(key(0)), [ServerId(1), ServerId(2)]);
        for block in 1..CLAIMS_MAX as u64 {
            claims.note_claim(key(block), ServerId(3));
        }
        assert_eq!(claims.claimants(key(0)), [ServerId(2)]);
        claims.note_claim(key(CLAIMS_MAX as u64), ServerId(3));
        assert_eq!(claims.claimants(key(0)), []);
        assert_eq!(
            (claims.servers_by_block.len(), claims.order.len()),
            (CLAIMS_MAX, CLAIMS_MAX)
        );
    }
}
