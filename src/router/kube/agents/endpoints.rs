//! The addresses of agents, from the EndpointSlices of their headless Service.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};

/// The name of the port. If a slice has only one port, its name does not matter.
const PORT: &str = "agent";

/// An address in a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::router::kube) struct At {
    node: String,
    address: SocketAddr,
    is_ready: bool,
    is_leaving: bool,
}

/// The addresses in a slice. Addresses without a node are ignored.
pub(in crate::router::kube) fn read(slice: &EndpointSlice) -> Vec<At> {
    let ports: Vec<_> = slice.ports.iter().flatten().collect();
    let named = ports.iter().find(|port| port.name.as_deref() == Some(PORT));
    let port = match (named, ports.as_slice()) {
        (Some(port), _) => port.port,
        (None, [only]) => only.port,
        (None, _) => None,
    };
    let Some(port) = port.and_then(|port| u16::try_from(port).ok()) else {
        return Vec::new();
    };
    let each = slice.endpoints.iter();
    each.filter_map(|endpoint| at(endpoint, port)).collect()
}

fn at(endpoint: &Endpoint, port: u16) -> Option<At> {
    let address: IpAddr = endpoint.addresses.first()?.parse().ok()?;
    let conditions = endpoint.conditions.as_ref();
    Some(At {
        node: endpoint.node_name.clone()?,
        address: SocketAddr::new(address, port),
        // The API defines that an absent value means ready.
        is_ready: conditions.and_then(|c| c.ready).unwrap_or(true),
        is_leaving: conditions.and_then(|c| c.terminating).unwrap_or(false),
    })
}

/// One address for each node, out of all slices. A node has several while one pod replaces another.
/// Then an address that is not terminating comes first, and after that one that is ready.
pub(in crate::router::kube) fn by_node<'a>(
    slices: impl Iterator<Item = &'a Vec<At>>,
) -> BTreeMap<String, SocketAddr> {
    let mut best: BTreeMap<&str, &At> = BTreeMap::new();
    for at in slices.flatten() {
        let rank = |at: &At| (!at.is_leaving, at.is_ready, at.address);
        let kept = best.entry(at.node.as_str()).or_insert(at);
        if rank(at) > rank(kept) {
            *kept = at;
        }
    }
    let all = best.into_iter();
    all.map(|(node, at)| (node.to_string(), at.address))
        .collect()
}
