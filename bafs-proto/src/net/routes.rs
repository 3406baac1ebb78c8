//! Whether an address is on a network that this machine is attached to, from the kernel's table of
//! routes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Flag of a route that leads through another machine (`RTF_GATEWAY`).
const ROUTE_GATEWAY: u32 = 0x2;

/// Flags of a route that is up (`RTF_UP`), and of one that refuses (`RTF_REJECT`).
const ROUTE_UP: u32 = 0x1;
const ROUTE_REJECT: u32 = 0x200;

/// Whether packets to `address` pass through no router.
pub(super) fn is_directly_attached(address: IpAddr) -> bool {
    if address.is_loopback() {
        return true;
    }
    let table = match address {
        IpAddr::V4(_) => "/proc/net/route",
        IpAddr::V6(_) => "/proc/net/ipv6_route",
    };
    // An unreadable table makes no server local.
    std::fs::read_to_string(table).is_ok_and(|table| has_on_link_route(&table, address))
}

/// Whether the most specific route to `address` leads through no other machine.
fn has_on_link_route(table: &str, address: IpAddr) -> bool {
    let routes = table.lines().filter_map(|line| match address {
        IpAddr::V4(address) => route_v4(line, address),
        IpAddr::V6(address) => route_v6(line, address),
    });
    // A default route does not define neighbours.
    routes
        .max()
        .is_some_and(|(length, direct)| direct && length > 0)
}

/// Length of the prefix and whether the route is direct, if it leads to `address`.
fn route_v4(line: &str, address: Ipv4Addr) -> Option<(u32, bool)> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let mut next = || u32::from_str_radix(fields.next()?, 16).ok();
    let (to, _gateway, flags) = (next()?, next()?, next()?);
    let mask = fields.nth(3)?;
    // Numbers in the machine's byte order, the address in network order.
    let mask = u32::from_str_radix(mask, 16).ok()?;
    let wanted = u32::from_ne_bytes(address.octets());
    let leads = wanted & mask == to && flags & (ROUTE_UP | ROUTE_REJECT) == ROUTE_UP;
    leads.then_some((mask.count_ones(), flags & ROUTE_GATEWAY == 0))
}

/// As [`route_v4`].
fn route_v6(line: &str, address: Ipv6Addr) -> Option<(u32, bool)> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let to = u128::from_str_radix(fields.first()?, 16).ok()?;
    let prefix = u32::from_str_radix(fields.get(1)?, 16).ok()?;
    let flags = u32::from_str_radix(fields.get(8)?, 16).ok()?;
    let mask = u128::MAX.checked_shl(128 - prefix.min(128)).unwrap_or(0);
    let leads = u128::from(address) & mask == to && flags & (ROUTE_UP | ROUTE_REJECT) == ROUTE_UP;
    leads.then_some((prefix, flags & ROUTE_GATEWAY == 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: &str = "\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0
eth0\t0001A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0
eth0\t8001A8C0\t0201A8C0\t0003\t0\t0\t100\tC0FFFFFF\t0\t0\t0
";

    const V6: &str = "\
fd000000000000000000000000000000 40 00000000000000000000000000000000 00 \
00000000000000000000000000000000 00000100 00000001 00000000 00000001 eth0
00000000000000000000000000000000 00 00000000000000000000000000000000 00 \
fe800000000000000000000000000001 00000400 00000001 00000000 00000003 eth0
00000000000000000000000000000000 00 00000000000000000000000000000000 00 \
00000000000000000000000000000000 ffffffff 00000001 00000000 00200200 lo
";

    #[test]
    fn addresses_on_the_local_link_are_recognised() {
        let near = |table: &str, address: &str| {
            has_on_link_route(table, address.parse().expect("address"))
        };
        assert!(near(V4, "192.168.1.77"));
        assert!(!near(V4, "192.168.2.77"), "by the router");
        assert!(
            !near(V4, "192.168.1.130"),
            "a route of its own, by a router"
        );
        assert!(near(V6, "fd00::7"));
        assert!(!near(V6, "2001:db8::7"));
        assert!(!near("", "192.168.1.77"));
        assert!(is_directly_attached("127.0.0.1".parse().expect("address")));
    }
}
