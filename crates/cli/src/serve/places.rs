//! Places for connections: so many in all, and so many of one address.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Connections by the address that they come from; no number is 0.
type Taken = Arc<Mutex<HashMap<IpAddr, usize>>>;

/// Places for connections.
pub(super) struct Places {
    free: Arc<Semaphore>,
    per_address: usize,
    taken: Taken,
}

/// The place of a connection, which is free again when it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    address: IpAddr,
    taken: Taken,
    _permit: OwnedSemaphorePermit,
}

impl Places {
    /// So many of them, and so many of one address.
    pub(super) fn new(n: usize, per_address: usize) -> Places {
        Places {
            free: Arc::new(Semaphore::new(n.min(Semaphore::MAX_PERMITS))),
            per_address,
            taken: Taken::default(),
        }
    }

    /// Waits until one is free.
    pub(super) async fn wait(&self) -> OwnedSemaphorePermit {
        let free = Arc::clone(&self.free).acquire_owned().await;
        free.expect("it is never closed")
    }

    /// Gives the place `permit` to a connection from `ip`; `None` if its address has as many as it may.
    pub(super) fn take(&self, permit: OwnedSemaphorePermit, ip: IpAddr) -> Option<Place> {
        let address = whose(ip);
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let n = taken.get(&address).copied().unwrap_or(0);
        if n >= self.per_address {
            return None;
        }
        taken.insert(address, n + 1);
        Some(Place {
            address,
            taken: Arc::clone(&self.taken),
            _permit: permit,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        match taken.get_mut(&self.address) {
            Some(n) if *n > 1 => *n -= 1,
            _ => drop(taken.remove(&self.address)),
        }
    }
}

/// Whose address `ip` is: of IPv6 a network of 64 bits, as one client has all of its addresses.
fn whose(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & (u128::MAX << 64))),
        ip => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_address_leaves_places_to_others() {
        let places = Places::new(3, 2);
        let take = async |ip: &str| places.take(places.wait().await, ip.parse().unwrap());
        let one = take("192.0.2.1").await.unwrap();
        let mapped = take("::ffff:192.0.2.1").await;
        assert!(mapped.is_some());
        assert!(take("192.0.2.1").await.is_none());
        let other = take("192.0.2.2").await;
        assert!(other.is_some());
        assert_eq!(places.free.available_permits(), 0);
        drop(one);
        assert!(take("192.0.2.1").await.is_some());
        drop((mapped, other));
        // Nothing is left of who is gone.
        assert!(places.taken.lock().unwrap().is_empty());
        assert_eq!(places.free.available_permits(), 3);
    }

    #[test]
    fn a_network_of_ipv6_is_one_client() {
        let whose = |ip: &str| whose(ip.parse().unwrap());
        assert_eq!(whose("2001:db8::1"), whose("2001:db8::ffff:1"));
        assert_ne!(whose("2001:db8::1"), whose("2001:db8:0:1::1"));
        assert_ne!(whose("127.0.0.1"), whose("127.0.0.2"));
    }
}
