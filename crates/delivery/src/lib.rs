//! sterna-delivery.
