import { Sterna } from 'sterna'; void Sterna
